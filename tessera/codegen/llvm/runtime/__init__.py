"""Runtime of the LLVM generator: machine code, threads, reports, and the emulator in their place."""
