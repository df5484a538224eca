"""Floor 3. One module a step, named by its revision."""
