"""Programs for CUDA without a GPU: the PTX that other compilers emit runs in the emulator, with checks."""
