"""A look into the memory of a program that ran."""

from tessera.interp.target.csl.host.runtime import debug_util

__all__ = ["debug_util"]
