"""Research extensions: generated kernels, embedded languages, search, privacy, federation, speculation."""
