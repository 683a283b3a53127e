"""The launch of a kernel that is called without one.

- A kernel that asks for its place in a group (`local_id`, `group_size`, `thread_id`, `warp_id`, `warp`) runs as one
  group of 32 · num_warps tiles.
- With `tile_shape` the grid covers the leading axes of a tensor in blocks of that shape: the last tensor
  parameter (the one written), or the first where the kernel returns a value.
- A kernel that asks for its place in the grid runs once for each element of that tensor's first axis.
- Any other kernel runs once.

Only the kernel's own lines are searched for such questions, not the functions it calls.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence

from tessera.kernel.ids import GRID_IDS, GROUP_IDS, LANES
from tessera.types import RefType, Type


def names(body: Iterable[ast.stmt]) -> frozenset[str]:
    """Every name and attribute that statements mention."""
    walked = [n for s in body for n in ast.walk(s)]
    attributes = {n.attr for n in walked if isinstance(n, ast.Attribute)}
    return frozenset(attributes | {n.id for n in walked if isinstance(n, ast.Name)})


def returns(body: Iterable[ast.stmt]) -> bool:
    """Whether statements hand back a value."""
    return any(isinstance(n, ast.Return) and n.value is not None for s in body for n in ast.walk(s))


def walked(body: Sequence[ast.stmt], types: Mapping[str, Type]) -> str | None:
    """The tensor whose axes the grid walks."""
    refs = [name for name, type in types.items() if isinstance(type, RefType)]
    if not refs:
        return None
    return refs[0] if returns(body) else refs[-1]


def launch(
    body: Sequence[ast.stmt], types: Mapping[str, Type], tile_shape: tuple[int, ...], num_warps: int
) -> tuple[tuple[int, ...], int]:
    """The grid and the group size."""
    mentioned = names(body)
    group = num_warps * LANES if mentioned & GROUP_IDS else 1
    tensor = walked(body, types)
    if tensor is None:
        return (1,), group
    if not tile_shape and (group > 1 or not mentioned & GRID_IDS):
        return (1,), group
    sizes = [int(s) for s in types[tensor].shape]  # type: ignore[arg-type]
    blocks = [-(-size // tile) for size, tile in zip(sizes, tile_shape or (1,), strict=False)]
    return tuple(blocks) or (1,), group
