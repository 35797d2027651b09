"""Terminal interface: the script `accrete`, its help, version and completion."""
