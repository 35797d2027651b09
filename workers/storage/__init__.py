"""Results on any file system (artifacts, checkpoints, task states, locks), and remote files."""
