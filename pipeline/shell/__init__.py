"""Progress of a run on the terminal."""
