"""Scalar functions as IR: decompositions of float functions into arithmetic, shared by all targets."""
