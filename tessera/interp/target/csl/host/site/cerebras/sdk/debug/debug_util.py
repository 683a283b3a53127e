"""Debug module of the vendor's API: reads the memory of a program after its run."""

from tessera.interp.target.csl.host.runtime import debug_util

__all__ = ["debug_util"]
