"""Memory spaces (`ts.memory`): annotations that place values in a space, classes of buffers, and prefetched copies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessera.core.errors import ArgumentError, UnknownNameError, user_location
from tessera.core.hooks import find_storage_function
from tessera.core.types import DISK, GLOBAL, HOST, REGISTER, SHARED, TensorType
from tessera.frontend.kernel.memref import MemRefAccess, MemRefView, takes_memrefs
from tessera.frontend.kernel.signature import MemorySpace, PlacedType
from tessera.frontend.kernel.tile_api.memory import (
    alloc_register,
    alloc_shared,
    barrier,
    cp_async,
    cp_commit_group,
    cp_wait_group,
    locate_access,
)
from tessera.frontend.kernel.trace import CURRENT_TRACE
from tessera.ir.tensor import Tensor

SPACES = (REGISTER, SHARED, GLOBAL, HOST, DISK)
_ALLOCATORS: dict[str, Callable[..., MemRefView]] = {REGISTER: alloc_register, SHARED: alloc_shared}


class BufferStruct:
    """A class of placed annotations; called it allocates them: `m = Buffers()`, `m.field[i]`.

    A kernel allocates the fields in shared and register memory, the host the others. A field whose memory is of the
    other side is an error where it is asked for.
    """

    def __init__(self, definition: type) -> None:
        self.name, self.__doc__ = definition.__name__, inspect.getdoc(definition)
        self.fields = {
            n: _as_placed_type(definition, n, a) for n, a in inspect.get_annotations(definition, eval_str=True).items()
        }

    def __call__(self, **given: Any) -> AllocatedBuffers:
        """Memory for every field of this side: in a kernel without initial values, on the host zeros.

        On the host a field may be `given`: a tensor, an array or, for "disk", the path of a .npy file.

        Raises:
            ArgumentError: an argument is not a host field, or is in another memory space.
        """
        inside = CURRENT_TRACE.get() is not None
        own = {n: p for n, p in self.fields.items() if (p.space.name in _ALLOCATORS) == inside}
        if unknown := [n for n in given if inside or n not in own]:
            raise ArgumentError(
                f"{self.name} takes no `{unknown[0]}` here", location=user_location(), expected=", ".join(own)
            )
        make = self._in_kernel if inside else self._on_host
        views = {
            n: find_storage_function("as_placed")(given[n], p.space.name) if n in given else make(n, p)
            for n, p in own.items()
        }
        elsewhere = {n: p.space.name for n, p in self.fields.items() if n not in own}
        return AllocatedBuffers(self.name, views, elsewhere)

    def _in_kernel(self, name: str, placed: PlacedType) -> MemRefView:
        view = _ALLOCATORS[placed.space.name](tuple(placed.type.shape), placed.type.dtype)
        view.memory.named(name)
        return view

    def _on_host(self, name: str, placed: PlacedType) -> Any:
        if not isinstance(placed.type, TensorType):
            raise ArgumentError(
                f"the field `{name}` of {self.name} says no shape", location=user_location(),
                expected=f"{self.name}({name}=...)",
            )  # fmt: skip
        return find_storage_function("made")(placed.space.name, placed.type)


def _as_placed_type(definition: type, name: str, annotation: Any) -> PlacedType:
    whole = isinstance(annotation, PlacedType) and annotation.type is Tensor and annotation.space.name in (HOST, DISK)
    if not whole and not (isinstance(annotation, PlacedType) and isinstance(annotation.type, TensorType)):
        raise ArgumentError(
            f"the field `{name}` of {definition.__name__} says neither shape nor memory", location=user_location(),
            expected='Tensor[64, 64, f32] @ ts.memory("shared")', received=repr(annotation),
        )  # fmt: skip
    return annotation  # type: ignore[no-any-return]


_IN_KERNEL_HINT = ("a kernel allocates", "ask for {}() in a kernel")
_ON_HOST_HINT = ("the host allocates", "pass it as an argument of the kernel")


@dataclass(frozen=True)
class AllocatedBuffers:
    """The buffers of one `Buffers()`, as attributes."""

    name: str
    views: dict[str, Any]
    elsewhere: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name in self.elsewhere:
            space = self.elsewhere[name]
            side = _IN_KERNEL_HINT if space in _ALLOCATORS else _ON_HOST_HINT
            raise ArgumentError(
                f"`{name}` lies in {space} memory, which {side[0]}", suggestion=side[1].format(self.name)
            )
        if name.startswith("__") or name not in self.views:
            raise UnknownNameError(f"{self.name} has no field `{name}`", expected=", ".join(self.views))
        return self.views[name]


@dataclass(frozen=True)
class PrefetchedCopy:
    """A copy of a part of memory, for the body of a `with`."""

    view: MemRefView

    def close(self) -> None:
        """End it: other tiles may still read it, so that nobody goes on to overwrite it before they have."""
        if self.view.memory.type.space == SHARED:
            barrier()


_SPACE_NAMES = {"smem": SHARED, "L2_cache": "L2"}  # what else spaces are called


@takes_memrefs
def prefetch(place: Any, to: str = SHARED, *, into: str | None = None, overlap: str | None = "compute") -> Any:
    """For the body of a `with`, a copy of a part of memory in "shared" or "register" memory.

    `with ts.memory.prefetch(A[m : m + BM, :]) as a:` names the copy; `with ts.memory.prefetch(A):` lets `A` itself
    mean the copy inside. Every tile of the group enters and leaves together. What is written to the copy stays there.
    Outside of kernels see `tessera.runtime.storage.near`. `into` is another name of `to`; the copy overlaps with what
    is computed before its first use, so that `overlap` is "compute" or None.

    Raises:
        ArgumentError: this is no part of memory of known shape, no such space, or nothing to overlap with.
    """
    to = _SPACE_NAMES.get(into or to, into or to)
    if overlap not in ("compute", None):
        raise ArgumentError("a copy overlaps with computation", expected='"compute" or None', received=repr(overlap))
    if CURRENT_TRACE.get() is None:
        return find_storage_function("near")(place, to)
    found = locate_access(place, (), None) if isinstance(place, MemRefAccess) else None
    if not isinstance(found, MemRefView) or not found.shape:
        raise ArgumentError("only a part of memory is prefetched", expected="a tensor, or A[m : m + BM, :]",
                            received=repr(place))  # fmt: skip
    allocate = _ALLOCATORS.get(to)
    if allocate is None:
        raise ArgumentError(f'"{to}" is not a memory to prefetch into', expected=" or ".join(_ALLOCATORS))
    copy = allocate(found.shape, found.dtype)
    cp_async(copy, found)
    cp_commit_group()
    cp_wait_group(0)
    if to == SHARED:
        barrier()
    return PrefetchedCopy(copy)


def pipeline(stages: int = 2) -> Callable[[Any], Any]:
    """`@ts.memory.pipeline(stages=3)`: a function whose loads and stores (`ts.async_load`) run beside what it computes.

    At most `stages` copies are under way at once (`tessera.runtime.storage.pipelined`). Of a kernel, which targets
    pipeline by
    themselves, it says how many blocks ahead they fetch: its schedule's `stages`.

    Raises:
        ArgumentError: `stages` is no number of at least 1, or what it decorates is no function.

    >>> import tessera as ts
    >>> @ts.memory.pipeline(stages=2)
    ... def total(batches):
    ...     return sum(ts.async_load(b).wait().sum().item() for b in batches)
    >>> total([ts.ones((4,)), ts.ones((2,))])
    6.0
    """

    def apply(function: Any) -> Any:
        if hasattr(function, "with_schedule"):  # a kernel
            return function.with_schedule(function.schedule.with_stages(stages))
        if not callable(function):
            raise ArgumentError("a pipeline is made of a function", location=user_location(), received=repr(function),
                                suggestion="@ts.memory.pipeline(stages=3)")  # fmt: skip
        return find_storage_function("pipelined")(function, stages)

    return apply


PUBLIC = ("Pool", "async_copy", "buffer", "flush", "on_disk", "prefetch_to_l2", "reuse", "space_of", "use_pool")


class MemoryNamespace:
    """`ts.memory("shared")` is a space for annotations, `@ts.memory` makes buffers of a class.

    Its attributes are what moves and holds memory: `prefetch`, `pipeline`, `async_copy`, `Pool`, `use_pool`, `buffer`,
    `reuse`, `on_disk`, `flush`, `space_of`, `prefetch_to_l2`.
    """

    prefetch: Any = staticmethod(prefetch)
    pipeline = staticmethod(pipeline)

    def __getattr__(self, name: str) -> Any:
        if name not in PUBLIC:
            raise AttributeError(f"ts.memory has no {name!r}")
        return find_storage_function(name)

    def __call__(self, what: Any) -> Any:
        """A space by its name, or the buffers of a class.

        Raises:
            ArgumentError: there is no such space, or a field says no shape and memory.
        """
        if isinstance(what, type):
            return BufferStruct(what)
        if what not in SPACES:
            raise ArgumentError(f"{what!r} is not a memory space", location=user_location(), expected=", ".join(SPACES))
        return MemorySpace(what)


memory = MemoryNamespace()
