"""`ts.memory`: which memory something lies in, said in annotations; and parts of memory brought nearer for a while."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessera.errors import ArgumentError, UnknownNameError, here
from tessera.kernel.copies import alloc_register, alloc_shared, barrier, cp_async, cp_commit_group, cp_wait_group
from tessera.kernel.marks import takes_places
from tessera.kernel.place import Place, View
from tessera.kernel.trace import current
from tessera.kernel.transfer import locate
from tessera.types import GLOBAL, REGISTER, SHARED, TensorType

SPACES = (REGISTER, SHARED, GLOBAL)
_ALLOCATED: dict[str, Callable[..., View]] = {REGISTER: alloc_register, SHARED: alloc_shared}


@dataclass(frozen=True)
class Space:
    """A memory space in an annotation: `Tensor[128, f32] @ ts.memory("register")`."""

    name: str

    def __rmatmul__(self, type: Any) -> Placed:
        return Placed(type, self)


@dataclass(frozen=True)
class Placed:
    """A type and the space where its values lie."""

    type: Any
    space: Space


class Buffers:
    """A class of placed annotations; called in a kernel it allocates them: `m = Buffers()`, `m.field[i]`."""

    def __init__(self, definition: type) -> None:
        self.name, self.__doc__ = definition.__name__, inspect.getdoc(definition)
        self.fields = {
            n: _placed(definition, n, a) for n, a in inspect.get_annotations(definition, eval_str=True).items()
        }

    def __call__(self) -> Allocated:
        """Memory for every field, without initial values."""
        current(self.name)
        return Allocated(self.name, {n: self._made(n, p) for n, p in self.fields.items()})

    def _made(self, name: str, placed: Placed) -> View:
        allocate = _ALLOCATED.get(placed.space.name)
        if allocate is None:
            raise ArgumentError(
                f"`{name}` lies in {placed.space.name} memory, which a kernel does not allocate",
                expected=" or ".join(_ALLOCATED), suggestion="pass it as an argument of the kernel",
            )  # fmt: skip
        made = allocate(tuple(placed.type.shape), placed.type.dtype)
        made.memory.named(name)
        return made


def _placed(definition: type, name: str, annotation: Any) -> Placed:
    if not isinstance(annotation, Placed) or not isinstance(annotation.type, TensorType):
        raise ArgumentError(
            f"the field `{name}` of {definition.__name__} says neither shape nor memory", location=here(),
            expected='Tensor[64, 64, f32] @ ts.memory("shared")', received=repr(annotation),
        )  # fmt: skip
    return annotation


@dataclass(frozen=True)
class Allocated:
    """The buffers of one `Buffers()`, as attributes."""

    name: str
    views: dict[str, View]

    def __getattr__(self, name: str) -> View:
        if name.startswith("__") or name not in self.views:
            raise UnknownNameError(f"{self.name} has no field `{name}`", expected=", ".join(self.views))
        return self.views[name]


@dataclass(frozen=True)
class Prefetched:
    """A copy of a part of memory, for the body of a `with`."""

    view: View

    def close(self) -> None:
        """End it: other tiles may still read it, so that nobody goes on to overwrite it before they have."""
        if self.view.memory.type.space == SHARED:
            barrier()


@takes_places
def prefetch(place: Any, to: str = SHARED) -> Prefetched:
    """For the body of a `with`, a copy of a part of memory in "shared" or "register" memory.

    `with ts.memory.prefetch(A[m : m + BM, :]) as a:` names the copy; `with ts.memory.prefetch(A):` lets `A` itself
    mean the copy inside. Every tile of the group enters and leaves together. What is written to the copy stays there.

    Raises:
        ArgumentError: this is no part of memory of known shape, or no such space.
    """
    found = locate(place, (), None) if isinstance(place, Place) else None
    if not isinstance(found, View) or not found.shape:
        raise ArgumentError("only a part of memory is prefetched", expected="a tensor, or A[m : m + BM, :]",
                            received=repr(place))  # fmt: skip
    allocate = _ALLOCATED.get(to)
    if allocate is None:
        raise ArgumentError(f'"{to}" is not a memory to prefetch into', expected=" or ".join(_ALLOCATED))
    copy = allocate(found.shape, found.dtype)
    cp_async(copy, found)
    cp_commit_group()
    cp_wait_group(0)
    if to == SHARED:
        barrier()
    return Prefetched(copy)


class Memory:
    """`ts.memory("shared")` is a space for annotations, `@ts.memory` makes buffers of a class; and `prefetch`."""

    def __init__(self) -> None:
        self.prefetch = prefetch

    def __call__(self, what: Any) -> Any:
        """A space by its name, or the buffers of a class.

        Raises:
            ArgumentError: there is no such space, or a field says no shape and memory.
        """
        if isinstance(what, type):
            return Buffers(what)
        if what not in SPACES:
            raise ArgumentError(f"{what!r} is not a memory space", location=here(), expected=", ".join(SPACES))
        return Space(what)


memory = Memory()


def unplaced(annotation: Any, name: str) -> Any:
    """The annotation of a kernel's parameter without its space, which is global.

    Raises:
        ArgumentError: it says another space.
    """
    if not isinstance(annotation, Placed):
        return annotation
    if annotation.space.name != GLOBAL:
        raise ArgumentError(
            f"the parameter `{name}` cannot lie in {annotation.space.name} memory", location=here(),
            expected="global", suggestion="allocate it in the kernel: tile.alloc_shared(...)",
        )  # fmt: skip
    return annotation.type
