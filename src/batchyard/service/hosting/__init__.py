"""Floor 6. What a server adds to the life of a Batch: many at once, tenants, files, keys, and no end of its own."""
