"""The `tile` API: the functions that users call in kernels."""
