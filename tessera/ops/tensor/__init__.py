"""Tensor ops, each whole: semantics, type rule, lowering, derivative, batching and error rule in one place."""
