"""What stands in the store, as tables and metrics."""
