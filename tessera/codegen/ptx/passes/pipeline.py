"""The pass that finds loops of products whose blocks a tensor-map copy can fetch: they become a `product_loop`.

Such a loop carries one block, to which each round adds the product of a block of `a` and one of `b`, read from global
memory where only the index moves. It is emitted with its own threads to fetch, a ring of buffers between them and
those that multiply, and the warp-group instructions of sm_90a.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.ptx.ops import multiply_add, product_loop
from tessera.codegen.ptx.passes.products import together
from tessera.codegen.ptx.types import size
from tessera.evaluate import copier, rebuild
from tessera.ir.builder import Builder
from tessera.ir.core import Function, Node, Value
from tessera.ops import basic, control, elementwise, linalg, shape, tile
from tessera.types import (
    GLOBAL,
    DType,
    RefType,
    TensorType,
    bf16,
    f16,
    f32,
    fp8_e4m3,
    fp8_e5m2,
    int8,
    int32,
    int64,
    uint8,
)

ROW_BYTES = 128  # of a block's inner axis: one row of the swizzle
COLUMNS = (64, 128, 256)
ROWS = (64, 128, 256)
SUMS = 128  # registers of a thread for the block that is carried
STRIDE = 16  # bytes that rows in memory are a multiple of
# The types of sides, with what their sums are in. Of those of 8 bits the instructions want both sides by rows.
SIDES = {bf16: f32, f16: f32, fp8_e4m3: f32, fp8_e5m2: f32, int8: int32, uint8: int32}
HALVES = (bf16, f16)
Producers = Mapping[Value, Node]


@dataclass(frozen=True)
class Side:
    """One side of the product as memory: where its block begins on each axis, and whether it is turned around."""

    ref: Value
    starts: tuple[Value, ...]
    block: tuple[int, ...]
    flipped: bool = False


@dataclass(frozen=True)
class Loop:
    """A loop that fits: its two sides."""

    node: Node
    left: Side
    right: Side
    step: int

    @property
    def depth(self) -> int:
        """How deep its blocks are to be: as a row of the swizzle, so that its rounds are cut into some, or joined."""
        return ROW_BYTES // size(self.left.ref.type.dtype)  # type: ignore[union-attr]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns and depth of a round's product."""
        rows, depth = self.left.block[-2:][::-1] if self.left.flipped else self.left.block[-2:]
        return rows, self.right.block[-2 if self.right.flipped else -1], depth


def pipelined(function: Function) -> Function:
    """The function with its loop of products as a `product_loop`, if it has one that fits, at its top."""
    producers = {v: node for node in function.body.walk() for v in node.results}
    loops = [found for node in function.body.nodes if (found := _fitting(function, producers, node))]
    sums = [n for n in function.body.walk() if n.op in (multiply_add, linalg.dot)]
    if len(loops) != 1 or len(sums) != 1:
        return function
    (loop,) = loops

    def meaning_of(builder: Builder) -> Callable[..., Any]:
        copy = copier(builder)

        def meaning(node: Node, args: list[Any], run: Any) -> Sequence[Any]:
            return _recorded(builder, loop, args, run.env, producers) if node is loop.node else copy(node, args, run)

        return meaning

    return rebuild(function, meaning_of)


def _recorded(
    builder: Builder, loop: Loop, args: Sequence[Value], env: dict[Value, Value], producers: Producers
) -> Sequence[Value]:
    """The loop as one op."""
    index = loop.node.regions[0].params[0]
    lower, upper, _, acc = args
    starts: list[Value] = []

    def place(v: Value) -> int:
        if v is index:
            return -1
        # A start that the body makes is a constant.
        starts.append(env.get(v) or builder.add(basic.full, [], producers[v].attrs, loc=loop.node.loc).out)
        return len(starts) - 1

    left, right = (tuple(place(v) for v in side.starts) for side in (loop.left, loop.right))
    step = loop.step
    if loop.depth != loop.sizes[2]:
        step, upper = loop.depth, _rounded(builder, lower, upper, max(loop.step, loop.depth))
    attrs = {"left": left, "right": right, "flipped": loop.right.flipped, "turned": loop.left.flipped}
    attrs |= {"step": step, "block": (*loop.sizes[:2], loop.depth)}
    refs = [env[loop.left.ref], env[loop.right.ref]]
    return builder.add(product_loop, [acc, *refs, lower, upper, *starts], attrs, loc=loop.node.loc).results


def _rounded(builder: Builder, lower: Value, upper: Value, step: int) -> Value:
    """Where a loop's last round ends: it may reach past its upper bound."""
    ends = [builder.producers.get(v) for v in (lower, upper)]
    if all(n is not None and n.op is basic.full for n in ends):
        first, last = (int(n.attrs["value"]) for n in ends if n is not None)
        return _scalar(builder, first - (first - last) // step * step)
    one = _scalar(builder, step)
    count = builder.add(elementwise.sub, [upper, lower]).out
    count = builder.add(elementwise.add, [count, _scalar(builder, step - 1)]).out
    whole = builder.add(elementwise.mul, [builder.add(elementwise.floor_divide, [count, one]).out, one]).out
    return builder.add(elementwise.add, [lower, whole]).out


def _scalar(builder: Builder, n: int) -> Value:
    return builder.add(basic.full, [], {"shape": (), "value": n, "dtype": int64}).out


def _fitting(function: Function, producers: Producers, node: Node) -> Loop | None:
    """A node as a loop that fits, or None."""
    if node.op is not control.for_ or len(node.args) != 4 or int(function.attrs.get("group", 1)) != 1:
        return None
    (body,) = node.regions
    step, last = producers.get(node.args[2]), producers.get(body.results[0])
    if step is None or step.op is not basic.full or last is None or last.op is not multiply_add:
        return None
    if last not in body.nodes or last.args[0] is not body.params[1]:
        return None
    inside = {v: n for n in body.nodes for v in n.results}
    sides = [side_of(inside, v) for v in last.args[1:]]
    used = {id(n) for n in body.nodes} - {id(last)}
    if None in sides or not all(_moves(n) for n in body.nodes if id(n) in used):
        return None
    found = Loop(node, sides[0], sides[1], int(step.attrs["value"]))  # type: ignore[arg-type]
    fits = _sized(found) and _even(producers, found) and _steady(function, producers, found, body.params[0])
    return found if fits else None


def _moves(node: Node) -> bool:
    """Whether a node of the body only brings a block, or a constant."""
    return node.op in (tile.load, shape.reshape, shape.permute, basic.full)


def side_of(inside: Producers, v: Value) -> Side | None:
    """A block as memory: a load, perhaps turned around, or without its axes of size 1."""
    node, flipped = inside.get(v), False
    while node is not None and node.op in (shape.permute, shape.reshape):
        (x,) = node.args
        if node.op is shape.permute:
            if tuple(node.attrs["axes"]) != (1, 0):
                return None
            flipped = not flipped
        elif [n for n in x.type.shape if n != 1] != [n for n in node.out.type.shape if n != 1]:  # type: ignore[union-attr]
            return None
        node = inside.get(x)
    if node is None or node.op is not tile.load:
        return None
    ref, *starts = node.args
    rank = ref.type.rank  # type: ignore[union-attr]
    if len(starts) != rank or not fetched(ref.type, tuple(SIDES)) or any(n != 1 for n in node.attrs["shape"][:-2]):
        return None
    return Side(ref, tuple(starts), tuple(node.attrs["shape"]), flipped)


def fetched(type: Any, dtypes: tuple[DType, ...] = HALVES) -> bool:
    """Whether a copy engine can fetch blocks of a ref that has one of these types."""
    if not isinstance(type, RefType) or type.space != GLOBAL or not 2 <= type.rank <= 5:
        return False
    return type.dtype in dtypes and int(type.shape[-1]) * size(type.dtype) % STRIDE == 0


def _sized(loop: Loop) -> bool:
    """Whether the blocks are such as the instructions take."""
    rows, columns, _ = loop.sizes
    type = loop.left.ref.type
    assert isinstance(type, RefType)
    whole = rows in ROWS and columns in COLUMNS
    whole = whole and (type.dtype in HALVES or not loop.left.flipped)
    fits = rows * columns // (min(rows, 128) * 2) <= SUMS and (type.dtype in HALVES or loop.right.flipped)
    same = together(type.dtype, loop.right.ref.type.dtype)  # type: ignore[union-attr]
    return whole and fits and same and type.block(()).accumulate == SIDES[type.dtype]


def _even(producers: Producers, loop: Loop) -> bool:
    """Whether rounds are as deep as they are to be, or can be cut or joined: each goes on where the one before ends."""
    depth, index = loop.sizes[2], loop.node.regions[0].params[0]
    if depth == loop.depth:
        return True
    along = loop.left.starts[-2 if loop.left.flipped else -1], loop.right.starts[-1 if loop.right.flipped else -2]
    others = [*loop.left.starts, *loop.right.starts].count(index) > 2
    goes_on = loop.step == depth and set(along) == {index} and not others
    return goes_on and (depth % loop.depth == 0 or (loop.depth % depth == 0 and _joined(producers, loop)))


def _joined(producers: Producers, loop: Loop) -> bool:
    """Whether whole rounds of the new depth read no more than the loop does, or what lies outside of memory."""
    ends = [producers.get(v) for v in loop.node.args[:2]]
    if any(n is None or n.op is not basic.full for n in ends):
        return False
    lower, upper = (int(n.attrs["value"]) for n in ends if n is not None)
    rounds = -((lower - upper) // loop.step)
    sides = ((loop.left, -2 if loop.left.flipped else -1), (loop.right, -1 if loop.right.flipped else -2))
    most = max(int(side.ref.type.shape[axis]) for side, axis in sides)  # type: ignore[union-attr]
    return rounds * loop.step % loop.depth == 0 or most <= lower + rounds * loop.step


def _steady(function: Function, producers: Producers, loop: Loop, index: Value) -> bool:
    """Whether the sides stay as they are, and their places are known ahead: the index, or scalars of the program."""
    written = {n.args[0] for n in function.body.walk() if "write" in n.op.effects}
    if {loop.left.ref, loop.right.ref} & written or not {loop.left.ref, loop.right.ref} <= set(function.params):
        return False
    starts = [v for side in (loop.left, loop.right) for v in side.starts if v is not index]
    return all(known_ahead(producers, v) for v in (*loop.node.args[:3], *starts))


def known_ahead(producers: Producers, v: Value) -> bool:
    """Whether a scalar is computed from the program's place and parameters alone."""
    node = producers.get(v)
    if node is None:
        return v.type.rank == 0 if isinstance(v.type, TensorType) else False
    return early(node) and all(known_ahead(producers, x) for x in node.args)


def early(node: Node) -> bool:
    """Whether a node is arithmetic on scalars, or the program's place."""
    scalar = all(isinstance(v.type, TensorType) and not v.type.rank for v in node.results)
    return (
        scalar
        and bool(node.results)
        and (node.op.pointwise or node.op in (basic.full, tile.program_id, tile.grid_size))
    )
