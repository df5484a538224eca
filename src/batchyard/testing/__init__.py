"""Floor 9. Public doubles for users' tests and our own: stand-ins that speak real protocols."""
