"""Floor 8. The OpenAI dialect: files, batches, models, and the endpoints that answer at once."""
