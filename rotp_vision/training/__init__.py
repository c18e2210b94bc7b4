"""What `train_imagenet.py` is made of: configuration, data, checkpoints, feature cache, processes and reports."""
