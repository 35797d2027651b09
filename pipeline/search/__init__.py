"""Search files, spaces, trials, and Ray Tune."""
