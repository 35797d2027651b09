"""What runs inside a worker: it knows jobs, not graphs, and never imports `pipeline`."""
