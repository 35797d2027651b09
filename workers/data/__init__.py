"""Training data: reads shards, decodes and augments images, and returns batches (`feed.Feed`)."""
