"""Floor 3. What computes. Each engine answers dispatches of requests."""
