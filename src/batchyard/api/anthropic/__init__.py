"""Floor 8. The Anthropic dialect: messages, live and streamed, translated to chat completions and back."""
