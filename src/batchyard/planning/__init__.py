"""Floor 4. When is waiting worth it? Pure estimates of time and cost."""
