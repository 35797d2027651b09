"""Bundles, predictions, and servers."""
