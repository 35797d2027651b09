"""Models in bundles, and their answers to images."""
