"""Floor 3. The engine `openai`: any server that speaks the OpenAI API, local or a provider's."""

from batchyard.engines.openai.engine import OpenAIEngine

__all__ = ["OpenAIEngine"]
