"""The driver: a config becomes a graph, the graph becomes stages, results become records."""
