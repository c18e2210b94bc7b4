"""Images and feature maps on disk, shared by training, probing and embedding."""
