"""Floor 3. The engine `llama`: embedded text generation by llama.cpp, in a child process."""

from batchyard.engines.llama.engine import LlamaEngine

__all__ = ["LlamaEngine"]
