"""Floor 3. Steps from each schema that a release had to the next."""
