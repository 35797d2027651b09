"""Reports for people: pages, tables and plots, read from the store and never from a live run."""
