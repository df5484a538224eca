"""Batchyard: the batching layer for AI inference.

Importing this package loads the standard library only; the command line, the engines and the stores
bring their own dependencies when they are used (`pip install 'batchyard[local]'`).
"""

from batchyard._version import __version__

__all__ = ["__version__"]
