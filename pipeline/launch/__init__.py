"""Where stages run: in this process, or on worker groups of Ray."""
