"""Read results from the store: tables and metrics of runs and searches. Start with `tables`."""
