"""Floor 6. Intake: reading, checking and registering inputs; rows of tables become requests."""
