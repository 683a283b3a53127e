"""Structured control flow: nodes with regions. Their meaning is in each interpreter's table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tessera.op import STORAGE, Op, op


def direct(op: Op, operands: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """For ops that only a builder makes: they are never called on tensors."""
    raise AssertionError(f"{op.name} is built, not called")


def _given(*types: Any) -> None:
    raise AssertionError("the builder gives the types of nodes with regions")


@op(infer=_given, coerce=direct, numerics=STORAGE, name="for")
def for_(lower, upper, step, *carried):
    """Repeat the region for i from `lower` to before `upper` by `step` (int64 scalars, step not 0).

    The region takes (i, *carried) and gives the next carried values; the last are the results.
    """


@op(infer=_given, coerce=direct, numerics=STORAGE, name="while")
def while_(*carried):
    """Repeat the second region, carried to carried, while the first, carried to a bool scalar, holds."""


@op(infer=_given, coerce=direct, numerics=STORAGE, name="if")
def if_(condition, *, apart: bool = False):
    """The results of the first region where the bool scalar holds, else of the second.

    `apart`: the tiles of a group go through it each by itself, whatever they wait for there.
    """


@op(infer=_given, coerce=direct, numerics=STORAGE, dialect="transform")
def called(*operands: Any) -> Any:
    """The results of the region: a traced function that was called."""
