"""Floor 3. What remembers: job state in a database, bodies and results in files."""
