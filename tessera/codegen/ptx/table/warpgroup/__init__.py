"""Warp-specialised kernels: TMA producer, wgmma consumers, ring buffer, epilogue, ping-pong schedule (CUTLASS)."""
