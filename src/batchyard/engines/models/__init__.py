"""Floor 3. Models: what can be had by name, where they lie, and how they get there."""

from batchyard.engines.models.catalogue import CATALOGUE, DEFAULT_EMBEDDING, DEFAULT_LANGUAGE, CatalogueModel
from batchyard.engines.models.resolve import ModelFile, resolve

__all__ = ["CATALOGUE", "DEFAULT_EMBEDDING", "DEFAULT_LANGUAGE", "CatalogueModel", "ModelFile", "resolve"]
