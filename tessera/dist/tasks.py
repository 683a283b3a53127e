"""Parallel calls: functions on parts of data, each as a rank: over a list of devices, or along a level of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.dist.collectives import all_gather
from tessera.dist.engines import run_ranks
from tessera.dist.mesh import Mesh, current_mesh
from tessera.dist.ranks import CURRENT_RANK, get_rank
from tessera.dist.spmd import Spmd
from tessera.ir.builder import CURRENT_BUILDER
from tessera.ir.tensor import as_tensor
from tessera.ops.tensor.argument_checks import check_function
from tessera.ops.tensor.collectives import local_part


def parallel_map(function: Callable[..., Any], items: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
    """The results of `function(item, device)` for each item and its device, in order; each call is a rank of its own.

    The ranks are simulated in this process; they may use collectives. In a traced function the calls follow each other.

    Raises:
        ArgumentError: there is not one device for each item.
    """
    check_function(function, "parallel_map")
    if len(items) != len(devices):
        raise ArgumentError(
            f"{len(items)} items for {len(devices)} devices", location=user_location(),
            expected="one device for each item", suggestion="ts.shard(x, axis=0, devices=devices) gives one for each",
        )  # fmt: skip
    pairs = list(zip(items, devices, strict=True))
    return _run_all([functools.partial(function, item, device) for item, device in pairs])


def parallel_apply(functions: Sequence[Callable[..., Any]], items: Sequence[Any]) -> list[Any]:
    """The result of each function on its item, in order: experts on the tokens that came to each.

    Raises:
        ArgumentError: there is not one item for each function.
    """
    if len(functions) != len(items):
        raise ArgumentError(
            f"{len(functions)} functions for {len(items)} items", location=user_location(),
            expected="one item for each function",
        )  # fmt: skip
    return _run_all([functools.partial(f, item) for f, item in zip(functions, items, strict=True)])


def _run_all(calls: list[Callable[[], Any]]) -> list[Any]:
    if CURRENT_BUILDER.get() is not None or CURRENT_RANK.get() is not None or not calls:
        return [call() for call in calls]
    mesh = Mesh(len(calls), "items", engine="simulated")
    found = run_ranks(mesh, lambda: calls[get_rank()]())
    return [found[i] for i in range(len(calls))]


class ParallelLevels:
    """`ts.parallel(level="node")`: a function of the parts of its first argument along a level of a mesh."""

    def __call__(self, level: str, mesh: Mesh | None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator: the first argument is cut along its first axis over a mesh axis, the results are joined.

        Nested functions cut their part again, along their own level. A level that the mesh does not have is not cut.
        The mesh is that of the `with` block around the outermost call.

        >>> import tessera as ts
        >>> with ts.HierarchicalMesh({"node": 2, "gpu": 2}):
        ...     ts.parallel(level="node")(ts.parallel(level="gpu")(lambda x: x * ts.get_rank()))(ts.ones((4,)))
        Tensor([0., 1., 2., 3.], f32)

        Raises:
            ArgumentError: there is no mesh.
        """

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            check_function(function, "parallel")

            @functools.wraps(function)
            def call(x: Any, *rest: Any) -> Any:
                context, around = CURRENT_RANK.get(), current_mesh()
                if context is not None:
                    return _run_part(function, level, context.mesh, x, rest)
                found = mesh or (around.mesh if around else None)
                if found is None:
                    raise ArgumentError(
                        f"the level {level!r} has no mesh", location=user_location(),
                        suggestion='with ts.HierarchicalMesh({"node": 2, "gpu": 4}): ...',
                    )  # fmt: skip
                return Spmd(lambda y, *more: _run_part(function, level, found, y, more), found)(x, *rest)

            return call

        return decorate

    def nested(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself: its inner functions say at which level each is parallel."""
        check_function(function, "parallel.nested")
        return function


def _run_part(function: Callable[..., Any], level: str, mesh: Mesh, x: Any, rest: Sequence[Any]) -> Any:
    if level not in mesh.axis_names:
        return function(x, *rest)
    part = local_part(as_tensor(x), axis=0, groups=mesh.groups(level))
    return all_gather(function(part, *rest), mesh.axis(level))


parallel = ParallelLevels()
