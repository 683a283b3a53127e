"""Front ends: traced Python functions (jit) and kernels read as source (kernel)."""
