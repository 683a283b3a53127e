"""Passes: each a function that returns a new program."""

from __future__ import annotations

from collections.abc import Callable

from tessera.ir.core import Function
from tessera.ir.rewrite import eliminate_common_subexpressions, eliminate_dead_code
from tessera.lower.passes.canonicalisation import canonicalise

# What a Graph function of primitives goes through, in order, before it is scheduled.
PIPELINE: tuple[tuple[str, Callable[[Function], Function]], ...] = (
    ("simplify", canonicalise),
    ("common subexpressions", eliminate_common_subexpressions),
    ("dead code", eliminate_dead_code),
)
