"""Launches in a program for a mesh: operands come as windows of host memory, as pieces with halos, or whole.

The programs are cut along one or two axes of the grid, over rows and columns of elements. Where a window of an operand
is its piece, nothing moves; halos come from the neighbours; other operands are gathered. A launch whose programs depend
on each other runs whole on every element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.types import REGISTER, RefType, TensorType
from tessera.ir.core import Block, Node, Value
from tessera.lower.mesh.control_flow import region_rules
from tessera.lower.mesh.launch_programs import TilePrograms, describe_window, emit_tile_number
from tessera.lower.mesh.launch_windows import LaunchAccesses, LaunchTiling, Window, analyse_launch, explain_whole
from tessera.lower.mesh.mesh_lowering import (
    LAUNCH_SHARE,
    PIECE_MEMORY_BYTES,
    MeshLowering,
    NoMapping,
    ShardedTensor,
    Sharding,
    count_piece_elements,
    tensor_type_of,
)
from tessera.ops.dialects import control_flow, mesh, tile
from tessera.ops.dialects.mesh import UNSPLIT

CROSSED = -2  # windows that move along one axis of their memory over the rows and over the columns of the mesh
BOTH = 2  # the mesh axis of tiles that are numbered over rows and columns


@dataclass(frozen=True)
class MappedTiling:
    """A cut of a launch, and for each axis of the grid the mesh axis over which its tiles lie."""

    accesses: LaunchAccesses
    tiling: LaunchTiling
    along: tuple[int, ...]

    def find_cut(self, window: Window, axis: int) -> int:
        """The mesh axis along which a window moves on an axis of its memory; UNSPLIT: none, CROSSED: two."""
        found = {self.along[a] for a, s in enumerate(window.steps[axis]) if s}
        return UNSPLIT if not found else found.pop() if len(found) == 1 else CROSSED

    def step(self, window: Window, axis: int) -> int:
        """How far neighbouring windows are apart on an axis."""
        return max(window.steps[axis])


@region_rules(control_flow.launch)
def _(lowering, node, run, operands):
    (region,), grid = node.regions, node.attrs["grid"]
    if node.attrs["attrs"].get("group", 1) > 1 or tile.uses_grid_barrier(region):
        raise lowering.make_mapping_error("its tiles wait for each other, and an element runs them in sequence")
    mapped = _choose_tiling(lowering, region, grid, node.attrs["written"], operands)
    return _emit_cut_launch(lowering, node, mapped, operands)


def _choose_tiling(
    lowering: MeshLowering,
    region: Block,
    grid: Sequence[int],
    written: Sequence[int],
    operands: Sequence[ShardedTensor],
) -> MappedTiling:
    """The cut of the least cost; one tile with all programs where none is legal."""
    accesses = analyse_launch(region, tuple(grid))
    best, cost = _choose_among(lowering, accesses, written, operands)
    while cost[0] or cost[2] > 1:  # programs too large, or idle elements
        found = [_choose_among(lowering, each, written, operands) for each in best.accesses.splits]
        if not found or min(f[1] for f in found) >= cost:
            break
        best, cost = min(found, key=lambda f: f[1])
    held = sum(_count_bytes(p) for p in region.params)
    if set(best.along) == {UNSPLIT} and held > PIECE_MEMORY_BYTES and (why := explain_whole(region, grid)):
        raise NoMapping(
            f"this launch is not cut over the elements of a mesh, and its memories do not fit one: {why.reason}",
            location=why.loc, expected=f"at most {PIECE_MEMORY_BYTES} bytes in each element", received=f"{held} bytes",
            suggestion="let each program store elements of its own, at indices that are affine in its program ids",
        )  # fmt: skip
    return best


def _choose_among(
    lowering: MeshLowering, accesses: LaunchAccesses, written: Sequence[int], operands: Sequence[ShardedTensor]
) -> tuple[MappedTiling, tuple]:
    found = []
    for mapped in _list_mapped_tilings(lowering, accesses):
        tiling = mapped.tiling
        if accesses.find_obstacle(tiling) or not all(_can_collect(mapped, tiling.windows[i]) for i in written):
            continue
        gathered = [i for i, x in enumerate(operands) if not _is_local(lowering, mapped, i, x)]
        held = accesses.count_bytes(tiling) + sum(_count_bytes(accesses.body.params[i]) for i in gathered)
        excess = max(0, held + accesses.temporaries + lowering.kept - int(PIECE_MEMORY_BYTES * LAUNCH_SHARE))
        found.append((mapped, (excess, len(gathered), math.prod(tiling.programs) * accesses.work, held)))
    return min(found, key=lambda f: f[1])


def _count_bytes(param: Value) -> int:
    return math.prod(map(int, param.type.shape)) * max(param.type.dtype.numpy.itemsize, 2)  # type: ignore[union-attr]


def _can_collect(mapped: MappedTiling, window: Window) -> bool:
    """Whether the windows of a written memory can be pieces or be gathered: over one mesh axis for each of its axes."""
    cuts = [mapped.find_cut(window, axis) for axis in range(len(window.shape))]
    return not any(window.first) and CROSSED not in cuts


def _list_mapped_tilings(lowering: MeshLowering, accesses: LaunchAccesses) -> Iterator[MappedTiling]:
    """The cuts of one axis of the grid over rows, columns or both, and of two over rows and columns."""
    grid, (rows, columns) = accesses.grid, lowering.mesh.grid
    axes = [a for a, n in enumerate(grid) if n > 1]
    choices: list[dict[int, int]] = [{}, *({a: m} for a in axes for m in (0, 1) if lowering.mesh.grid[m] > 1)]
    if rows > 1 and columns > 1:
        choices += [{a: BOTH} for a in axes] + [{a: 0, b: 1} for a, b in itertools.combinations(axes, 2)]
    for chosen in choices:
        counts = {0: rows, 1: columns, BOTH: rows * columns}
        tiles = [counts[chosen[a]] if a in chosen else 1 for a in range(len(grid))]
        programs = [-(-g // t) for g, t in zip(grid, tiles, strict=True)]
        along = tuple(chosen.get(a, UNSPLIT) for a in range(len(grid)))
        yield MappedTiling(accesses, accesses.tile(programs, tiles), along)


def _is_local(lowering: MeshLowering, mapped: MappedTiling, number: int, x: ShardedTensor) -> bool:
    """Whether an operand needs no gather: the host copies its windows, or they are pieces of it."""
    window = mapped.tiling.windows[number]
    return not any(window.moved) or x.source is not None or _find_piece(lowering, mapped, number, x.type) is not None


def _find_piece(lowering: MeshLowering, mapped: MappedTiling, number: int, type: TensorType) -> Sharding | None:
    """The sharding whose pieces, with halos, are the windows of a memory; None where there is none."""
    window, split = mapped.tiling.windows[number], []
    for axis, moved in enumerate(window.moved):
        cut, size = mapped.find_cut(window, axis), int(type.shape[axis])
        if not moved or cut == UNSPLIT:
            split.append(UNSPLIT)
            if moved and window.shape[axis] != size:
                return None
            continue
        step, low = mapped.step(window, axis), -window.first[axis]
        high = window.shape[axis] - step - low
        if cut == BOTH and (low or high > 0 or lowering.mesh.piece(size, 0) != step * lowering.mesh.grid[1]):
            return None
        if cut not in (0, 1, BOTH) or not 0 <= low <= step or high > step:
            return None
        if cut != BOTH and lowering.mesh.piece(size, cut) != step:
            return None
        split.append(0 if cut == BOTH else cut)
    cuts = [s for s in split if s >= 0]
    return tuple(split) if len(set(cuts)) == len(cuts) else None


def _emit_cut_launch(
    lowering: MeshLowering, node: Node, mapped: MappedTiling, operands: Sequence[ShardedTensor]
) -> list[ShardedTensor]:
    tiling, accesses, written = mapped.tiling, mapped.accesses, node.attrs["written"]
    windows = list(tiling.windows)
    for i in range(len(operands)):
        if not _is_local(lowering, mapped, i, operands[i]):
            windows[i] = _hold_whole(accesses.body.params[i])
    tiling = LaunchTiling(tiling.grid, tiling.programs, tiling.tiles, tuple(windows))
    mapped = MappedTiling(accesses, tiling, mapped.along)
    memories = []
    for i, param in enumerate(accesses.body.params):
        x = operands[i] if i < len(operands) else None
        memories.append(_emit_memory(lowering, mapped, i, param, x))
    number = _emit_number(lowering, mapped)
    before = lowering.cycles
    TilePrograms(lowering.builder, accesses, tiling, math.prod(tiling.tiles), number, memories).emit()
    lowering.cycles = before + math.prod(tiling.programs) * accesses.work * LAUNCH_CYCLES
    pairs = zip(node.results, written, strict=True)
    return [_make_result(lowering, mapped, tensor_type_of(v), i, memories[i]) for v, i in pairs]


LAUNCH_CYCLES = 8  # the cycles for an element that an op of a kernel computes


def _hold_whole(param: Value) -> Window:
    shape = tuple(int(n) for n in param.type.shape)  # type: ignore[union-attr]
    return Window(shape, (0,) * len(shape), ((0,),) * len(shape), (False,) * len(shape))


def _emit_number(lowering: MeshLowering, mapped: MappedTiling) -> Value:
    """The number of this element's tile."""
    used = set(mapped.along) - {UNSPLIT}
    if not used:
        return lowering.index(0)
    if used in ({0}, {1}):
        return lowering.place(used.pop())
    return emit_tile_number(lowering.builder, lowering.mesh.grid)


def _emit_memory(
    lowering: MeshLowering, mapped: MappedTiling, number: int, param: Value, x: ShardedTensor | None
) -> Value:
    """An element's memory for a parameter, with its window of the operand."""
    window, builder = mapped.tiling.windows[number], lowering.builder
    type = param.type
    assert isinstance(type, RefType)
    if x is not None and x.source is not None and not x.made.keys() - {x.split}:
        attrs = {"shape": window.shape, **_locate(lowering, mapped, window)}
        return builder.add(mesh.window, [x.source], attrs).out
    attrs = {"shape": window.shape, "dtype": type.dtype, "space": REGISTER}
    memory = builder.add(tile.alloc, [], attrs).out
    if x is not None:
        value = _emit_window(lowering, mapped, number, x)
        builder.add(tile.store, [memory, value, *(lowering.index(0) for _ in window.shape)])
    return memory


def _locate(lowering: MeshLowering, mapped: MappedTiling, window: Window) -> dict[str, Any]:
    """The attributes that locate a window by the number row * columns + column."""
    known = describe_window(window, mapped.tiling)
    if not any(window.moved):
        return {**known, "steps": tuple((0,) for _ in window.shape), "tiles": (1,)}
    used = set(mapped.along) - {UNSPLIT}
    if used == {0} and lowering.mesh.grid[1] > 1:  # all columns of a row have its tile
        return {
            **known,
            "steps": tuple((*s, 0) for s in known["steps"]),
            "tiles": (*known["tiles"], lowering.mesh.grid[1]),
        }
    if used == {1} and lowering.mesh.grid[0] > 1:
        return {
            **known,
            "steps": tuple((0, *s) for s in known["steps"]),
            "tiles": (lowering.mesh.grid[0], *known["tiles"]),
        }
    return known


def _emit_window(lowering: MeshLowering, mapped: MappedTiling, number: int, x: ShardedTensor) -> Value:
    """The window of a value that the elements hold in pieces."""
    window = mapped.tiling.windows[number]
    split = _find_piece(lowering, mapped, number, x.type) if any(window.moved) else None
    if split is None:
        whole = lowering.mesh.plain((UNSPLIT,) * x.type.rank)
        return lowering.broadcast_axes(x.at(whole), x.type)
    split = lowering.mesh.plain(split)
    value = x.at(split)
    for axis in range(x.type.rank):
        value = lowering.fill_padding(x, split, axis, 0, value)
    for axis in range(x.type.rank):
        if window.moved[axis]:
            value = _emit_axis_window(lowering, mapped, window, axis, value)
    return value


def _emit_axis_window(lowering: MeshLowering, mapped: MappedTiling, window: Window, axis: int, value: Value) -> Value:
    """The window along an axis of which a value is the piece: with halos, or this column's part of a row's piece."""
    cut, step, low = mapped.find_cut(window, axis), mapped.step(window, axis), -window.first[axis]
    at, length = axis - len(window.shape), window.shape[axis]
    if cut == BOTH:
        value = lowering.add(mesh.panel, value, lowering.place(1), axis=at, count=lowering.mesh.grid[1])
        return _slice(lowering, value, axis, 0, length)
    high = length - step - low
    parts = []
    if low:
        edge = _slice(lowering, value, axis, step - low, step)
        parts.append(_shift(lowering, edge, cut, 1))
    parts.append(_slice(lowering, value, axis, 0, min(step, length - low)))
    if high > 0:
        parts.append(_shift(lowering, _slice(lowering, value, axis, 0, high), cut, -1))
    return parts[0] if len(parts) == 1 else lowering.add(mesh.join, *parts, axis=at)


def _shift(lowering: MeshLowering, edge: Value, cut: int, offset: int) -> Value:
    if lowering.mesh.grid[cut] == 1:
        return lowering.full(tensor_type_of(edge), 0)
    return lowering.add(mesh.shift, edge, axis=cut, offset=offset)


def _slice(lowering: MeshLowering, value: Value, axis: int, start: int, stop: int) -> Value:
    sizes = [int(n) for n in value.type.shape]  # type: ignore[union-attr]
    if (start, stop) == (0, sizes[axis]):
        return value
    starts, stops = [0] * len(sizes), list(sizes)
    starts[axis], stops[axis] = start, stop
    return lowering.add(mesh.section, value, start=tuple(starts), stop=tuple(stops), step=(1,) * len(sizes))


def _make_result(
    lowering: MeshLowering, mapped: MappedTiling, type: TensorType, number: int, memory: Value
) -> ShardedTensor:
    """A written memory as a tensor: its windows are pieces, or they are gathered."""
    window = mapped.tiling.windows[number]

    def load() -> tuple[Sharding, Value]:
        starts = [lowering.index(0) for _ in window.shape]
        value = lowering.builder.add(tile.load, [memory, *starts], {"shape": window.shape}).out
        split = [UNSPLIT] * type.rank
        for axis, moved in enumerate(window.moved):
            if moved:
                split[axis], value = _gather_axis(lowering, mapped, window, axis, type, value)
        return tuple(split), value

    def make(wanted: Sharding) -> Value:
        split, value = load()
        return lowering.moved(type, split, value, wanted)

    def copy_back(out: Value) -> None:
        lowering.builder.add(mesh.copy_back, [out, memory], _locate(lowering, mapped, window), types=())

    split = tuple(_find_result_cut(lowering, mapped, window, axis, type) for axis in range(type.rank))
    return ShardedTensor(type, lowering.mesh.plain(split), make, copy_back=copy_back)


def _find_result_cut(lowering: MeshLowering, mapped: MappedTiling, window: Window, axis: int, type: TensorType) -> int:
    """The mesh axis over which an axis of a result lies after what must be gathered is gathered."""
    if not window.moved[axis]:
        return UNSPLIT
    cut, step = mapped.find_cut(window, axis), mapped.step(window, axis)
    span, over = (step * lowering.mesh.grid[1], 0) if cut == BOTH else (step, cut)
    return over if over in (0, 1) and lowering.mesh.piece(int(type.shape[axis]), over) == span else UNSPLIT


def _gather_axis(
    lowering: MeshLowering, mapped: MappedTiling, window: Window, axis: int, type: TensorType, value: Value
) -> tuple[int, Value]:
    """Windows along an axis as pieces; what is no piece is gathered."""
    cut, step, size = mapped.find_cut(window, axis), mapped.step(window, axis), int(type.shape[axis])
    if lacking := step - window.shape[axis]:
        sizes = tuple(lacking if a == axis else int(n) for a, n in enumerate(value.type.shape))  # type: ignore[union-attr]
        value = lowering.add(mesh.join, value, lowering.full(type.with_shape(sizes), 0), axis=axis - type.rank)
    over = _find_result_cut(lowering, mapped, window, axis, type)
    if cut == BOTH:
        span = step * lowering.mesh.grid[1]
        value = _gather(lowering, value, axis - type.rank, 1, span if over != UNSPLIT else min(span, size))
        cut = 0
    if over == UNSPLIT:
        value = _gather(lowering, value, axis - type.rank, cut, size)
    return over, value


def _gather(lowering: MeshLowering, value: Value, axis: int, along: int, size: int) -> Value:
    count = lowering.mesh.grid[along]
    if count == 1:
        return _slice(lowering, value, axis % len(value.type.shape), 0, size)  # type: ignore[union-attr]
    lowering.cycles += count_piece_elements(value) * count
    return lowering.add(mesh.all_gather, value, axis=axis, along=along, size=size)
