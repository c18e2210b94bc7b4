"""Feature vectors from any timm backbone, without training: embedding, scoring, and choosing a pooling for them."""
