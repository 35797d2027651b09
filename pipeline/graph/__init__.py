"""Stages, the graph of a config, the walk over the graph, and the store of results.

Start with `stage` (the data types) and `build` (from a config to a graph).
"""
