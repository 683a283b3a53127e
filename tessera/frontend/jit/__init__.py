"""The jit front end: traces Python functions over tensors into Graph functions."""
