"""Image classifiers on `tessera.nn`: ResNet and ViT, with the weights of PyTorch's state dicts."""
