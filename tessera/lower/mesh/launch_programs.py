"""Programs of a launch on a mesh: each element runs its tile of programs on its windows of the memories (SPMD)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tessera.core.types import REGISTER, RefType, int64
from tessera.ir.builder import Builder, evaluate_block, make_copier
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value
from tessera.lower.mesh.launch_windows import BEFORE_INDICES, LaunchAccesses, LaunchTiling, Window, cut_launch
from tessera.lower.mesh.mesh_lowering import PIECE_MEMORY_BYTES
from tessera.ops.dialects import control_flow, host, mesh, tile
from tessera.ops.tensor import basic, shape
from tessera.ops.tensor import elementwise as e

ROUND_AXIS = 2  # of the grid of a mesh program, after rows and columns


@dataclass
class TilePrograms:
    """The programs of one element's tile being emitted: `memories` are its windows, one for each parameter."""

    builder: Builder
    accesses: LaunchAccesses
    tiling: LaunchTiling
    elements: int
    number: Value  # of the tile
    memories: Sequence[Value]
    coordinates: list[Value] = field(init=False)

    def __post_init__(self) -> None:
        self.coordinates = self._find_coordinates()

    def index(self, value: int) -> Value:
        """A constant index."""
        return self.builder.add(basic.full, (), {"shape": (), "value": value, "dtype": int64}).out

    def _apply(self, op: Any, x: Value, number: int) -> Value:
        return self.builder.add(op, [x, self.index(number)]).out

    def _find_coordinates(self) -> list[Value]:
        """The coordinates of the tile, as in `mesh.locate_window`."""
        found, tiles = [], self.tiling.tiles
        for axis in range(len(tiles)):
            if axis and tiles[axis] == 1:
                found.append(self.index(0))
                continue
            span = math.prod(tiles[axis + 1 :])
            place = self.number if span == 1 else self._apply(e.floor_divide, self.number, span)
            found.append(place if axis == 0 else self._apply(e.remainder, place, tiles[axis]))
        return found

    def _scale(self, x: Value, factor: int) -> Value:
        return x if factor == 1 else self._apply(e.mul, x, factor)

    def start(self, window: Window, axis: int) -> Value:
        """The first index of a window along an axis."""
        total: Value | None = None
        for step, place in zip(window.steps[axis], self.coordinates, strict=True):
            if step:
                term = self._scale(place, step)
                total = term if total is None else self.builder.add(e.add, [total, term]).out
        if total is None:
            return self.index(window.first[axis])
        return self._apply(e.add, total, window.first[axis]) if window.first[axis] else total

    def emit(self) -> None:
        """Emit loops over the programs of the tile, with the kernel's body for each program of the grid."""
        self._emit_loops([])

    def _emit_loops(self, ids: list[Value]) -> None:
        axis = len(ids)
        if axis == len(self.tiling.grid):
            self._emit_guarded(ids)
            return
        count = self.tiling.programs[axis]
        first = self._scale(self.coordinates[axis], count)
        if count == 1:
            self._emit_loops([*ids, first])
            return

        def step(turn: Value) -> None:
            whole = self.tiling.tiles[axis] == 1 and axis
            self._emit_loops([*ids, turn if whole else self.builder.add(e.add, [first, turn]).out])

        emit_loop(self.builder, self.index, count, step)

    def _emit_guarded(self, ids: list[Value]) -> None:
        checks = [self._apply(e.less, ids[a], self.tiling.grid[a]) for a in self.tiling.padded_axes(self.elements)]
        if not checks:
            self._emit_body(ids)
            return
        condition = checks[0]
        for each in checks[1:]:
            condition = self.builder.add(e.bitwise_and, [condition, each]).out
        with self.builder.region() as nodes:
            self._emit_body(ids)
        regions = (Block((), tuple(nodes), ()), Block((), (), ()))
        self.builder.add(control_flow.if_, [condition], types=(), regions=regions)

    def _emit_body(self, ids: list[Value]) -> None:
        copy, grid = make_copier(self.builder), self.tiling.grid
        windows = dict(zip(self.accesses.body.params, self.tiling.windows, strict=True))

        def place(node: Node, args: list[Value], walk: Any) -> Sequence[Value]:
            axis = node.attrs.get("axis", 0)
            if node.op is tile.program_id:
                return [ids[axis] if axis < len(ids) else self.index(0)]
            if node.op is tile.grid_size:
                return [self.index(grid[axis] if axis < len(grid) else 1)]
            window = windows.get(node.args[0]) if node.op in BEFORE_INDICES else None
            if window is None or not any(window.moved):
                return copy(node, args, walk)
            with self.builder.at(node.loc):
                return self._emit_access(node, args, window)

        evaluate_block(self.accesses.body, self.memories, place)

    def _emit_access(self, node: Node, args: list[Value], window: Window) -> Sequence[Value]:
        """An access with indices relative to its window."""
        first, rank = BEFORE_INDICES[node.op], len(window.shape)
        indices, rest = args[first : first + rank], args[first + rank :]
        attrs = dict(node.attrs)
        if attrs.get("edge") == "clip":
            rest = self._clip(node, indices, rest, window)
            attrs["edge"] = "error" if self._is_inside(node, window) else "clip"
        if "vector" in attrs:
            attrs["vector"] = 1
        local = [
            self._subtract(index, self.start(window, axis)) if window.moved[axis] else index
            for axis, index in enumerate(indices)
        ]
        types = tuple(v.type for v in node.results)
        return self.builder.add(node.op, [*args[:first], *local, *rest], attrs, types=types).results

    def _subtract(self, index: Value, start: Value) -> Value:
        sizes = tuple(index.type.shape)  # type: ignore[union-attr]
        if sizes:
            start = self.builder.add(basic.broadcast_to, [start], {"shape": sizes}).out
        return self.builder.add(e.sub, [index, start]).out

    def _is_inside(self, node: Node, window: Window) -> bool:
        """Whether an access is proven to lie in bounds along the axes that are whole."""
        ref = node.args[0]
        for axis, size in enumerate(ref.type.shape):  # type: ignore[union-attr]
            footprint = self.accesses.footprints[ref][axis]
            if not window.moved[axis] and (footprint is None or not footprint.lies_within(int(size), self.tiling.grid)):
                return False
        return True

    def _clip(self, node: Node, indices: list[Value], rest: list[Value], window: Window) -> list[Value]:
        """The mask and other operands of an access whose window may extend past the memory.

        Zeros lie there, which suffices unless the access gives another value for them, or a store changes them.
        """
        ref, is_load = node.args[0], node.op is tile.load
        shared = ref in self.accesses.written and any("read" in n.op.effects for n in self.accesses.accesses[ref])
        if len(rest) < 2 if is_load else not shared:
            return rest
        sizes = tuple(int(n) for n in (node.attrs["shape"] if is_load else node.args[1].type.shape))  # type: ignore[union-attr]
        mask = self._broadcast(rest[0], sizes) if rest else None
        for axis, moves in enumerate(window.moved):
            limit = int(ref.type.shape[axis])  # type: ignore[union-attr]
            if moves and not self.accesses.footprints[ref][axis].lies_within(limit, self.tiling.grid):  # type: ignore[union-attr]
                inside = self._find_inside(indices[axis], axis, sizes, limit)
                mask = inside if mask is None else self.builder.add(e.bitwise_and, [mask, inside]).out
        return rest if mask is None else [mask, *rest[1:]]

    def _find_inside(self, start: Value, axis: int, sizes: tuple[int, ...], limit: int) -> Value:
        """Which elements of a block lie in the memory along an axis."""
        attrs = {"shape": sizes, "axis": axis - len(sizes), "dtype": int64}
        places = self.builder.add(shape.iota, (), attrs).out
        places = self.builder.add(e.add, [places, self._broadcast(start, sizes)]).out
        below = self.builder.add(e.less, [places, self._broadcast(self.index(limit), sizes)]).out
        above = self.builder.add(e.greater_equal, [places, self._broadcast(self.index(0), sizes)]).out
        return self.builder.add(e.bitwise_and, [below, above]).out

    def _broadcast(self, x: Value, sizes: tuple[int, ...]) -> Value:
        same = tuple(x.type.shape) == sizes  # type: ignore[union-attr]
        return x if same else self.builder.add(basic.broadcast_to, [x], {"shape": sizes}).out


def emit_loop(builder: Builder, index: Callable[[int], Value], count: int, step: Callable[[Value], None]) -> None:
    """Emit a loop without carried values: `step(number)` in each iteration."""
    turn = Value(index(0).type)
    with builder.region() as nodes:
        step(turn)
    region = Block((turn,), tuple(nodes), ())
    builder.add(control_flow.for_, [index(n) for n in (0, count, 1)], types=(), regions=(region,))


# A module that launches one kernel: the host copies the windows in, each element runs its tile, and the host copies the
# windows of written memories back; in rounds where there are more tiles than elements.


def partition_kernel(module: Module, mesh_grid: tuple[int, int], budget: int = PIECE_MEMORY_BYTES) -> Module:
    """Cut the launch of a kernel over the elements of a mesh, with at most about `budget` bytes in each.

    The module is returned as it is where the launch cannot be cut.
    """
    (launch, *more), function = module.main.body.nodes, module.functions[1]
    elements = math.prod(mesh_grid)
    if more or launch.op is not host.launch or tuple(launch.args) != tuple(module.main.params):
        return module
    if not all(isinstance(p.type, RefType) for p in function.params):
        return module  # the host copies windows of memories; scalars are arguments of every element
    if elements == 1 or function.attrs.get("group", 1) > 1 or tile.uses_grid_barrier(function.body):
        return module
    accesses, tiling = cut_launch(function.body, launch.attrs["grid"], elements, budget)
    if math.prod(tiling.tiles) == 1:
        return module
    count = len(function.params)
    back = [i for i, p in enumerate(accesses.body.params) if p in accesses.written]
    found = _make_module(function, accesses, tiling, mesh_grid, [*range(count)], [(i, i) for i in back])
    outputs = {"outputs": module.main.attrs.get("outputs", 0)}
    entry = Function(module.main.name, found.main.body, Attrs({**found.main.attrs, **outputs}), module.main.loc)
    return Module(module.level, (entry, *found.functions[1:]))


def partition_launch(function: Function, mesh_grid: tuple[int, int], budget: int) -> Module | None:
    """The program of a Graph function that is one launch of its parameters; None for any other function.

    As for a kernel, the host copies windows, in rounds where there are more tiles than elements.
    """
    (node, *more), results = function.body.nodes or (None,), function.body.results
    if node is None or more or node.op is not control_flow.launch or tuple(results) != node.results:
        return None
    (region,), known = node.regions, node.attrs
    independent = known["attrs"].get("group", 1) == 1 and not tile.uses_grid_barrier(region)
    if math.prod(mesh_grid) == 1 or tuple(node.args) != tuple(function.params) or not independent:
        return None
    accesses, tiling = cut_launch(region, known["grid"], math.prod(mesh_grid), budget)
    if math.prod(tiling.tiles) == 1:
        return None
    count = len(node.args)
    back = [(i, count + at) for at, i in enumerate(known["written"])]
    return _make_module(function, accesses, tiling, mesh_grid, [*range(count)], back)


def _make_module(
    function: Function, accesses: LaunchAccesses, tiling: LaunchTiling, mesh_grid: tuple[int, int],
    filled: Sequence[int], back: Sequence[tuple[int, int]],
) -> Module:  # fmt: skip
    """The program of a launch: the memories `filled` have windows of parameters.

    The pairs `back` (of a memory and a parameter) are copied back; parameters past the filled ones are outputs.
    """
    elements, builder = math.prod(mesh_grid), Builder()
    rounds, params = tiling.count_rounds(elements), accesses.body.params
    outputs = [i for i, to in back if to >= len(filled)]
    names = ["out" if len(outputs) == 1 else f"out{i}" for i in range(len(outputs))]
    refs = [Value(p.type, f.hint) for p, f in zip((params[i] for i in filled), function.params, strict=False)]
    refs += [Value(params[i].type, name) for i, name in zip(outputs, names, strict=True)]
    with builder.at(function.loc):
        memories = []
        for i, window in enumerate(tiling.windows):
            if i < len(filled):
                attrs = {"shape": window.shape, **describe_window(window, tiling)}
                memories.append(builder.add(mesh.window, [refs[i]], attrs).out)
            else:
                attrs = {"shape": window.shape, "dtype": params[i].type.dtype, "space": REGISTER}
                memories.append(builder.add(tile.alloc, [], attrs).out)
        number = emit_tile_number(builder, mesh_grid, rounds)
        TilePrograms(builder, accesses, tiling, elements, number, memories).emit()
        for i, to in back:
            builder.add(mesh.copy_back, [refs[to], memories[i]], describe_window(tiling.windows[i], tiling), types=())
    facts = Attrs({"group": 1, "mesh": mesh_grid, "rounds": rounds})
    program = Function(f"{function.name}_on_mesh", builder.block(refs, ()), facts, function.loc)
    main, grid = Builder(), (*mesh_grid, rounds) if rounds > 1 else mesh_grid
    own = tuple(Value(r.type, r.hint) for r in refs)
    with main.at(function.loc):
        main.add(host.launch, own, {"kernel": program.name, "grid": grid}, types=())
    entry = Function(function.name, main.block(own, ()), Attrs({"outputs": len(outputs)}), function.loc)
    return Module("tile", (entry, program))


def describe_window(window: Window, tiling: LaunchTiling) -> dict[str, Any]:
    """The attributes that locate a window.

    Leading axes of one tile are left out: the first coordinate has no limit, so that the windows of elements without a
    tile lie outside the memory, and no axis of one tile moves a window.
    """
    skipped = next((a for a, n in enumerate(tiling.tiles) if n > 1), 0)
    steps = tuple(s[skipped:] for s in window.steps)
    return {"first": window.first, "steps": steps, "tiles": tiling.tiles[skipped:]}


def emit_tile_number(builder: Builder, mesh_grid: tuple[int, int], rounds: int = 1) -> Value:
    """The number of this element's tile: by rows, columns and then rounds."""

    def place(axis: int, factor: int) -> Value:
        at = builder.add(tile.program_id, (), {"axis": axis}).out
        attrs = {"shape": (), "value": factor, "dtype": int64}
        return at if factor == 1 else builder.add(e.mul, [at, builder.add(basic.full, (), attrs).out]).out

    sizes = [(0, mesh_grid[1], mesh_grid[0]), (1, 1, mesh_grid[1]), (ROUND_AXIS, math.prod(mesh_grid), rounds)]
    parts = [place(axis, factor) for axis, factor, count in sizes if count > 1]
    total = parts[0]
    for each in parts[1:]:
        total = builder.add(e.add, [total, each]).out
    return total
