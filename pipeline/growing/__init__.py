"""Data that grow and shrink: new classes, new images and removals, for runs and model folders."""
