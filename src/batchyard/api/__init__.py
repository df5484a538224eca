"""Floor 8. What the world sees: HTTP in the dialects that people's code already speaks."""
