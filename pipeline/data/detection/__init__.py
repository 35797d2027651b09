"""Detect the data sets at a path: class folders, tables, archives or data sets of a library."""
