"""Feature vectors from any timm backbone, without training: embedding, scoring, and choosing a pooling for them."""

from rotp_vision.embedding.embedder import Embedder
from rotp_vision.embedding.folder import Embedded, embed_folder

__all__ = ['Embedded', 'Embedder', 'embed_folder']
