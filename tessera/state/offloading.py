"""Offloading: tensors that are not needed for a while in host memory or in files; they come back beside other work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.core.effects import perform_effects
from tessera.core.errors import TraceError, user_location
from tessera.core.pytree import flatten
from tessera.ir.tensor import Tensor
from tessera.runtime.storage import DISK, HOST
from tessera.runtime.storage.async_copies import AsyncLoad, Future, async_copy, run_async
from tessera.runtime.storage.memory_spaces import space_of


class Prefetch:
    """Tensors on their way back; `wait()` gives their container."""

    def __init__(self, load: AsyncLoad | Prefetch, finish: Callable[[Any], Any]) -> None:
        self._load, self._finish = load, finish

    def done(self) -> bool:
        """Whether `wait` does not wait."""
        return self._load.done()

    def wait(self) -> Any:
        """The container, its tensors in place."""
        return self._finish(self._load.wait())


def offload(tree: Any, folder: str | Path | None = None) -> Any:
    """A container whose tensors lie in host memory or, with a `folder`, in .npy files there that are read as touched.

    Calls take them as any others, on every target; those on a device copy them there. The state of an optimizer may be
    offloaded, too.

    >>> import tessera as ts
    >>> offload({"m": ts.ones((2,))})
    {'m': Tensor([1., 1.], f32)}

    Raises:
        TraceError: a tensor is traced. FileError: a file cannot be written.
    """
    leaves, parts = flatten(tree, empty=True)
    _refuse_traced(leaves)
    if folder is None:
        return parts.build(iter([x.to("cpu") if isinstance(x, Tensor) else x for _, x in leaves]))
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    copies = [
        async_copy(x, to=DISK, path=where / f"{path or 'value'}.npy") if isinstance(x, Tensor) else None
        for path, x in leaves
    ]
    return parts.build(iter([x if c is None else c.wait() for c, (_, x) in zip(copies, leaves, strict=True)]))


def prefetch(tree: Any, device: str | None = None) -> Prefetch:
    """Begin to bring the tensors of a container back to host memory, beside the program; `wait()` gives the container.

    With a `device` they lie there after `wait()`.

    >>> import tessera as ts
    >>> prefetch({"m": ts.ones((2,))}).wait()
    {'m': Tensor([1., 1.], f32)}

    Raises:
        TraceError: a tensor is traced.
    """
    leaves, parts = flatten(tree, empty=True)
    _refuse_traced(leaves)

    def finish(made: list[Any]) -> Any:
        placed = [x.to(device) if device is not None and isinstance(x, Tensor) else x for x in made]
        return parts.build(iter(placed))

    return Prefetch(AsyncLoad([_begin(x) for _, x in leaves], list), finish)


def _begin(leaf: Any) -> Future:
    return async_copy(leaf, to=HOST) if isinstance(leaf, Tensor) and space_of(leaf) == DISK else run_async(lambda: leaf)


def _refuse_traced(leaves: list[tuple[str, Any]]) -> None:
    """Tensors of a program being traced have no memory yet.

    Raises:
        TraceError: there is one; it is named.
    """
    if traced := [path for path, x in leaves if isinstance(x, Tensor) and x.is_traced]:
        raise TraceError(
            f"{traced[0] or 'the tensor'} is traced: it has no memory to move", location=user_location(),
            expected="a call outside of the traced function",
        )  # fmt: skip
    perform_effects(["memory"])
