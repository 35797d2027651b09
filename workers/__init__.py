"""Code that runs in a worker. It knows jobs, not graphs, and never imports `pipeline`."""
