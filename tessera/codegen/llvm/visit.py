"""The table of what happens when the walk over a tile function meets an op that is not computed lazily."""

from tessera.op import Rules

visit = Rules("llvm visit")
