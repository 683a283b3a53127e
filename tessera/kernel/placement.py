"""`ts.memory`: which memory something lies in; and parts of memory brought nearer for a while."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tessera import storage
from tessera.errors import ArgumentError, UnknownNameError, here
from tessera.kernel.copies import alloc_register, alloc_shared, barrier, cp_async, cp_commit_group, cp_wait_group
from tessera.kernel.kernel import Kernel
from tessera.kernel.marks import takes_places
from tessera.kernel.place import Place, View
from tessera.kernel.spaces import Placed, Space
from tessera.kernel.trace import TRACE
from tessera.kernel.transfer import locate
from tessera.tensor import Tensor
from tessera.types import GLOBAL, REGISTER, SHARED, TensorType

HOST, DISK = storage.HOST, storage.DISK
SPACES = (REGISTER, SHARED, GLOBAL, HOST, DISK)
_ALLOCATED: dict[str, Callable[..., View]] = {REGISTER: alloc_register, SHARED: alloc_shared}


class Buffers:
    """A class of placed annotations; called it allocates them: `m = Buffers()`, `m.field[i]`.

    A kernel allocates the fields in shared and register memory, the host the others. A field whose memory is of the
    other side is an error where it is asked for.
    """

    def __init__(self, definition: type) -> None:
        self.name, self.__doc__ = definition.__name__, inspect.getdoc(definition)
        self.fields = {
            n: _placed(definition, n, a) for n, a in inspect.get_annotations(definition, eval_str=True).items()
        }

    def __call__(self, **given: Any) -> Allocated:
        """Memory for every field of this side: in a kernel without initial values, on the host zeros.

        On the host a field may be `given`: a tensor, an array or, for "disk", the path of a .npy file.

        Raises:
            ArgumentError: what is given is no field of the host, or lies in another memory.
        """
        inside = TRACE.get() is not None
        own = {n: p for n, p in self.fields.items() if (p.space.name in _ALLOCATED) == inside}
        if unknown := [n for n in given if inside or n not in own]:
            raise ArgumentError(f"{self.name} takes no `{unknown[0]}` here", location=here(), expected=", ".join(own))
        make = self._in_kernel if inside else self._on_host
        views = {n: storage.as_placed(given[n], p.space.name) if n in given else make(n, p) for n, p in own.items()}
        elsewhere = {n: p.space.name for n, p in self.fields.items() if n not in own}
        return Allocated(self.name, views, elsewhere)

    def _in_kernel(self, name: str, placed: Placed) -> View:
        view = _ALLOCATED[placed.space.name](tuple(placed.type.shape), placed.type.dtype)
        view.memory.named(name)
        return view

    def _on_host(self, name: str, placed: Placed) -> Any:
        if not isinstance(placed.type, TensorType):
            raise ArgumentError(
                f"the field `{name}` of {self.name} says no shape", location=here(),
                expected=f"{self.name}({name}=...)",
            )  # fmt: skip
        return storage.made(placed.space.name, placed.type)


def _placed(definition: type, name: str, annotation: Any) -> Placed:
    whole = isinstance(annotation, Placed) and annotation.type is Tensor and annotation.space.name in (HOST, DISK)
    if not whole and not (isinstance(annotation, Placed) and isinstance(annotation.type, TensorType)):
        raise ArgumentError(
            f"the field `{name}` of {definition.__name__} says neither shape nor memory", location=here(),
            expected='Tensor[64, 64, f32] @ ts.memory("shared")', received=repr(annotation),
        )  # fmt: skip
    return annotation  # type: ignore[no-any-return]


_KERNELS = ("a kernel allocates", "ask for {}() in a kernel")
_HOSTS = ("the host allocates", "pass it as an argument of the kernel")


@dataclass(frozen=True)
class Allocated:
    """The buffers of one `Buffers()`, as attributes."""

    name: str
    views: dict[str, Any]
    elsewhere: dict[str, str]

    def __getattr__(self, name: str) -> Any:
        if name in self.elsewhere:
            space = self.elsewhere[name]
            side = _KERNELS if space in _ALLOCATED else _HOSTS
            raise ArgumentError(
                f"`{name}` lies in {space} memory, which {side[0]}", suggestion=side[1].format(self.name)
            )
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
def prefetch(place: Any, to: str = SHARED) -> Any:
    """For the body of a `with`, a copy of a part of memory in "shared" or "register" memory.

    `with ts.memory.prefetch(A[m : m + BM, :]) as a:` names the copy; `with ts.memory.prefetch(A):` lets `A` itself
    mean the copy inside. Every tile of the group enters and leaves together. What is written to the copy stays there.
    Outside of kernels see `tessera.storage.near`.

    Raises:
        ArgumentError: this is no part of memory of known shape, or no such space.
    """
    if TRACE.get() is None:
        return storage.near(place, to)
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


def pipeline(stages: int = 2) -> Callable[[Any], Any]:
    """`@ts.memory.pipeline(stages=3)`: a function whose loads and stores (`ts.async_load`) run beside what it computes.

    At most `stages` copies are under way at once (`tessera.storage.pipelined`). Of a kernel, which targets pipeline by
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
        if isinstance(function, Kernel):
            return function.with_schedule(function.schedule.with_stages(stages))
        if not callable(function):
            raise ArgumentError("a pipeline is made of a function", location=here(), received=repr(function),
                                suggestion="@ts.memory.pipeline(stages=3)")  # fmt: skip
        return storage.pipelined(function, stages)

    return apply


PUBLIC = ("Pool", "async_copy", "buffer", "flush", "on_disk", "prefetch_to_l2", "reuse", "space_of", "use_pool")


class Memory:
    """`ts.memory("shared")` is a space for annotations, `@ts.memory` makes buffers of a class.

    Its attributes are what moves and holds memory: `prefetch`, `pipeline`, `async_copy`, `Pool`, `use_pool`, `buffer`,
    `reuse`, `on_disk`, `flush`, `space_of`, `prefetch_to_l2`.
    """

    prefetch = staticmethod(prefetch)
    pipeline = staticmethod(pipeline)

    def __getattr__(self, name: str) -> Any:
        if name not in PUBLIC:
            raise AttributeError(f"ts.memory has no {name!r}")
        return getattr(storage, name)

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
