"""Passes: each a function that gives a new program, one rewrite a file."""

from __future__ import annotations

from collections.abc import Callable

from tessera.ir.core import Function
from tessera.passes.common import share
from tessera.passes.dead_code import sweep
from tessera.passes.simplify import simplify

# What a Graph function of primitives goes through, in order, before it is scheduled.
PIPELINE: tuple[tuple[str, Callable[[Function], Function]], ...] = (
    ("simplify", simplify),
    ("common subexpressions", share),
    ("dead code", sweep),
)
