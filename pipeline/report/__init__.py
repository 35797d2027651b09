"""Reports for people: pages, tables and plots, made from the store and never from a live run."""
