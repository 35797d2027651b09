"""Where stages run: in this process, or on worker groups of Ray. Also forecasts of their cost.

Start reading at `executor.make_executor`. `command.launch` writes the files to run a config on
Slurm, Kubernetes or a cloud.
"""
