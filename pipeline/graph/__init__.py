"""Stages, the graph of a config, the walk over it, and the store of results."""
