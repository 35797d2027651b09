"""Shards in, batches out."""
