"""Search settings: search files, spaces, trials, and Ray Tune. Start with `run.execute`."""
