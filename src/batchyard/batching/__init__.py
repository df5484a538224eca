"""Floor 1. Which requests go together? Pure decisions, and the thin asyncio shell of the library."""
