"""Cards, source formats, and ingest: raw data to shards."""
