"""Floor 6. What a server adds to the life of a Batch: many at once, tenants, files and keys."""
