"""Stages, the graph of a config, the walk over the graph, and the store of results."""
