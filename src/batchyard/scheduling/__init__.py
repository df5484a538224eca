"""Floor 2. Whose turn is it? Pure decisions; `now` and `rng` come as arguments."""
