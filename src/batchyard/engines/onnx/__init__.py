"""Floor 3. The engine `onnx`: embedded embeddings without padding, the same bits in every company."""

from batchyard.engines.onnx.engine import OnnxEngine

__all__ = ["OnnxEngine"]
