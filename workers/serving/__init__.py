"""Bundles (model folders that serve all tasks of a run), and predictions with them."""
