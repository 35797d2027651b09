"""The read model of the store: tables and metrics of runs and searches."""
