"""Every instruction and intrinsic that only computes: its row, whichever file it is in."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tessera.interp.target.llvm import (
    address,
    arith,
    casts,
    float_math,
    integer_math,
    vector_math,
    vectors,
)
from tessera.interp.target.llvm.arith import Pure
from tessera.interp.target.llvm.syntax import Instruction

Build = Callable[[Instruction], Pure]

INSTRUCTIONS: dict[str, Build] = {**arith.TABLE, **casts.TABLE, **vectors.TABLE, **address.TABLE}

_FIRST = "expect expect.with.probability launder.invariant.group strip.invariant.group ssa.copy".split()

INTRINSICS: dict[str, Build] = {
    **float_math.TABLE,
    **integer_math.TABLE,
    **vector_math.TABLE,
    **dict.fromkeys((*_FIRST, "threadlocal.address"), lambda i: lambda x, *rest: x),
    "ptrmask": lambda i: lambda pointer, mask: pointer & mask.astype(np.int64),
    "is.constant": lambda i: lambda x: np.zeros(1, bool),
}


def intrinsic(name: str, table: dict) -> object | None:
    """The row of `llvm.fma.v16f32`: the name without prefix and type suffixes."""
    parts = name.removeprefix("llvm.").split(".")
    for end in range(len(parts), 0, -1):
        if (found := table.get(".".join(parts[:end]))) is not None:
            return found
    return None


def call(i: Instruction) -> Pure | None:
    """The function behind a call to an intrinsic or the C library, if it only computes."""
    if i.word.startswith("llvm."):
        build = intrinsic(i.word, INTRINSICS)
        return build(i) if build is not None else None  # type: ignore[operator]
    return float_math.library(i.word, i.type)
