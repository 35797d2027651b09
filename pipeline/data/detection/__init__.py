"""What data lies at a path: folders, tables, shards or a library's data set, in bounds."""
