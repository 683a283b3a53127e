"""The numeric context that is open: what ops called in it do to their operands, or None."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tessera.op import Op


class Numerics(Protocol):
    """A context that takes over the calls made in it."""

    def call(self, op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> Any:
        """The results of an op on a user's operands."""

    def key(self) -> Hashable:
        """What a trace made in it depends on."""


NUMERICS: ContextVar[Numerics | None] = ContextVar("numerics", default=None)


@contextmanager
def suspended(instead: Numerics | None) -> Iterator[None]:
    """Another context, or none, for the calls made inside."""
    token = NUMERICS.set(instead)
    try:
        yield
    finally:
        NUMERICS.reset(token)
