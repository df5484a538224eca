"""Floor 6. The life of a Batch: the only door to a store."""
