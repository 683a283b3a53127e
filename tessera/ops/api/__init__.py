"""User-facing API of tensors: methods, indexing, creation, the NumPy protocols and data types."""
