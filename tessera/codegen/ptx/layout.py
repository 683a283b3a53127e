"""Distributed layouts: which thread of a team holds which elements of a block, and in which of its registers; and the
values that threads of a team derive from their numbers.

A layout is linear over bits (compare Triton's linear layouts): block sizes are rounded up to powers of two, and each
bit of an element's index comes from a bit of the register number or of the thread number. A bit of the thread number
that gives nothing (None) means replication: both threads hold the same. Layouts of matrix products follow the PTX ISA:
mma.m16n8 and wgmma fragments, or a square of elements in each thread.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from tessera.codegen.ptx.ops import element_of_row, matmul_accumulate, prefetched_load, uses_any_mma
from tessera.codegen.ptx.text.builder import PtxBuilder
from tessera.core.errors import ArgumentError
from tessera.ir.core import Function, Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ops.dialects import tile
from tessera.ops.tensor import contractions, reduce, shape

LayoutBit = tuple[int, int]  # an axis, and a bit of the index along it
Sizes = tuple[int, ...]


def bit_width(n: int) -> int:
    """The number of bits of an index below `n`.

    >>> bit_width(1), bit_width(8), bit_width(9)
    (0, 3, 4)
    """
    return max(n - 1, 0).bit_length()


@dataclass(frozen=True)
class DistributedLayout:
    """The layout of a block of `shape`: the index bit that each bit of a register and of a thread number gives."""

    shape: Sizes
    registers: tuple[LayoutBit, ...]
    threads: tuple[LayoutBit | None, ...]

    def __str__(self) -> str:
        def show(bits: Sequence[LayoutBit | None]) -> str:
            return " ".join("-" if b is None else f"{b[0]}.{b[1]}" for b in bits)

        return f"{'x'.join(map(str, self.shape))} registers [{show(self.registers)}] threads [{show(self.threads)}]"

    @property
    def count(self) -> int:
        """The registers that each thread holds."""
        return 1 << len(self.registers)

    @cached_property
    def offsets(self) -> tuple[Sizes, ...]:
        """For each register, the index of its element relative to the thread's first one."""
        found = []
        for number in range(self.count):
            place = [0] * len(self.shape)
            for i, (axis, position) in enumerate(self.registers):
                place[axis] += (number >> i & 1) << position
            found.append(tuple(place))
        return tuple(found)

    @cached_property
    def index(self) -> Mapping[Sizes, int]:
        """The register of each relative index."""
        return {place: i for i, place in enumerate(self.offsets)}

    @property
    def replicated_bits(self) -> tuple[int, ...]:
        """Replication: the thread bits that give no index bit; threads that differ only there hold the same."""
        return tuple(i for i, bit in enumerate(self.threads) if bit is None)

    def is_padded(self, axis: int) -> bool:
        """Whether the axis is padded to a power of two."""
        return 1 << bit_width(self.shape[axis]) != self.shape[axis]

    def max_thread_offset(self, axis: int) -> int:
        """The greatest index along an axis of a thread's first element."""
        return sum(1 << bit[1] for bit in self.threads if bit is not None and bit[0] == axis)

    def renamed(self, shape: Sizes, names: Mapping[LayoutBit, LayoutBit]) -> DistributedLayout:
        """The layout of a block of another shape, its index bits renamed; bits without a new name are dropped."""
        registers = tuple(names[bit] for bit in self.registers if bit in names)
        return DistributedLayout(
            shape, registers, tuple(names.get(bit) if bit is not None else None for bit in self.threads)
        )

    def permuted(self, axes: Sequence[int]) -> DistributedLayout:
        """The layout of the block after a permutation of its axes."""
        names = {(old, p): (new, p) for new, old in enumerate(axes) for p in range(bit_width(self.shape[old]))}
        return self.renamed(tuple(self.shape[a] for a in axes), names)

    def reduced(self, axes: Sequence[int], keep: bool) -> DistributedLayout:
        """The layout of a reduction's result: replicated over the threads along the reduced axes."""
        rest = [a for a in range(len(self.shape)) if a not in axes]
        shape = tuple(1 if a in axes else n for a, n in enumerate(self.shape) if keep or a not in axes)
        names = {
            (a, p): (a if keep else rest.index(a), p) for a in rest for p in range(bit_width(self.shape[a]))
        }  # fmt: skip
        return self.renamed(shape, names)

    def source(self, shape: Sizes) -> DistributedLayout:
        """The layout of a block of `shape` that broadcasts to this one without data movement."""
        missing = len(self.shape) - len(shape)
        names = {
            (axis + missing, p): (axis, p)
            for axis, n in enumerate(shape)
            for p in range(bit_width(n))
            if n == self.shape[axis + missing]
        }
        return self.renamed(shape, names)

    def reshaped(self, shape: Sizes) -> DistributedLayout | None:
        """The layout after a reshape without data movement; None if a size that is no power of two prevents that."""
        names = match_reshape_bits(self.shape, shape)
        return None if names is None else self.renamed(shape, names)


_LAYOUT_TEXT = re.compile(r"([\dx]*) registers \[([^\]]*)\] threads \[([^\]]*)\]")


@lru_cache(maxsize=4096)
def parse_layout(text: str) -> DistributedLayout:
    """The layout that `str` wrote.

    >>> layout = make_blocked_layout((4, 8), 8, 4)
    >>> parse_layout(str(layout)) == layout
    True
    """
    match = _LAYOUT_TEXT.fullmatch(text)
    if match is None:
        raise ArgumentError("the text is no layout", expected="4x8 registers [1.0 1.1] threads [1.2 -]", received=text)
    shape = tuple(int(n) for n in match[1].split("x") if n)
    registers, threads = ([_parse_bit(word) for word in match[i].split()] for i in (2, 3))
    return DistributedLayout(shape, tuple(b for b in registers if b is not None), tuple(threads))


def _parse_bit(word: str) -> LayoutBit | None:
    if word == "-":
        return None
    axis, _, position = word.partition(".")
    return int(axis), int(position)


def match_reshape_bits(here: Sizes, there: Sizes) -> dict[LayoutBit, LayoutBit] | None:
    """For each index bit of one shape the same bit in another shape of as many elements, in row-major order.

    >>> match_reshape_bits((4, 2), (8,))
    {(1, 0): (0, 0), (0, 0): (0, 1), (0, 1): (0, 2)}
    >>> match_reshape_bits((6, 2), (12,)) is None
    True
    """
    found: dict[LayoutBit, LayoutBit] = {}
    for ours, theirs in _match_axis_groups(here, there):
        even = all(1 << bit_width(n) == n for n in (*(here[a] for a in ours), *(there[a] for a in theirs)))
        if not even and [here[a] for a in ours] != [there[a] for a in theirs]:
            return None
        found.update(zip(_axis_bits(ours, here), _axis_bits(theirs, there), strict=True))
    return found


def _axis_bits(axes: Sequence[int], shape: Sizes) -> list[LayoutBit]:
    """The index bits of some axes, the fastest-varying first."""
    return [(a, p) for a in reversed(axes) for p in range(bit_width(shape[a]))]


def _match_axis_groups(here: Sizes, there: Sizes) -> list[tuple[list[int], list[int]]]:
    """The axes of two shapes in minimal groups of equal element counts, without axes of size 1, which have no bits."""
    ours, theirs = ([a for a, n in enumerate(shape) if n != 1] for shape in (here, there))
    found = []
    while ours or theirs:
        left, right = [ours.pop(0)], [theirs.pop(0)]
        sizes = [here[left[0]], there[right[0]]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                left.append(ours.pop(0))
                sizes[0] *= here[left[-1]]
            else:
                right.append(theirs.pop(0))
                sizes[1] *= there[right[-1]]
        found.append((left, right))
    return found


def make_blocked_layout(shape: Sizes, threads: int, vector: int) -> DistributedLayout:
    """Blocked layout: up to `vector` neighbours along the last axes in a thread's registers, then across threads.

    >>> print(make_blocked_layout((4, 8), 8, 4))
    4x8 registers [1.0 1.1] threads [1.2 0.0 0.1]
    """
    bits = [(a, p) for a in reversed(range(len(shape))) for p in range(bit_width(shape[a]))]
    lanes = bit_width(threads)
    inner = min(bit_width(vector), max(0, len(bits) - lanes), bit_width(shape[-1]) if shape else 0)
    across = bits[inner : inner + lanes]
    held = (*bits[:inner], *bits[inner + lanes :])
    return DistributedLayout(shape, held, (*across, *(None,) * (lanes - len(across))))


# Layouts of matrix products: the fragments of tensor cores, or a square of elements in each thread.


LANE_BITS = 5


def choose_dot_layout(node: Node, threads: int, by_rows: bool) -> DistributedLayout:
    """The layout of a product's result; `by_rows` stacks the warps along rows where each gets 16 rows."""
    shape = tuple(int(n) for n in node.out.type.shape)  # type: ignore[union-attr]
    if threads == 1 or not uses_any_mma(node):
        return make_square_layout(shape, threads)
    return make_mma_layout(shape, threads, by_rows and has_enough_rows(shape[0], threads))


def has_enough_rows(rows: int, threads: int) -> bool:
    """Whether each warp of a team has 16 rows of its own."""
    return bit_width(rows) >= 4 + bit_width(threads) - LANE_BITS


def make_mma_layout(shape: tuple[int, ...], threads: int, by_rows: bool = False) -> DistributedLayout:
    """Accumulator fragments of mma.m16n8: the warps tile the result in near squares, or along rows if `by_rows`.

    By rows the result has the layout of another product's left operand: a warp holds whole rows.

    A thread holds two neighbours of a row, two more eight rows below, and these again for each 8 columns
    (PTX ISA, "Matrix fragments for mma.m16n8k16").
    """
    rows, columns = bit_width(shape[0]), bit_width(shape[1])
    inner: list[LayoutBit] = [(1, 0), (0, 3)]
    lanes: list[LayoutBit] = [(1, 1), (1, 2), (0, 0), (0, 1), (0, 2)]
    down: list[LayoutBit] = [(0, p) for p in range(4, rows)]
    across: list[LayoutBit] = [(1, p) for p in range(3, columns)]
    warps: list[LayoutBit] = []
    while len(warps) < bit_width(threads) - LANE_BITS and (down or across):
        tall = 4 + len(down) >= 3 + len(across) or by_rows
        warps.append((down if tall and down else across or down).pop())
    sizes = (rows, columns)
    registers = tuple(b for b in (*inner, *across, *down) if b[1] < sizes[b[0]])
    known = tuple(b if b[1] < sizes[b[0]] else None for b in lanes)
    return DistributedLayout(
        shape, registers, (*known, *warps, *(None,) * (bit_width(threads) - LANE_BITS - len(warps)))
    )


def make_wgmma_layout(shape: tuple[int, ...], threads: int) -> DistributedLayout:
    """Accumulator fragments of wgmma: four warps stacked along rows, then the warp groups; further rows are registers.

    (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16".)
    """
    rows, columns = bit_width(shape[0]), bit_width(shape[1])
    lanes: list[LayoutBit] = [(1, 1), (1, 2), (0, 0), (0, 1), (0, 2), (0, 4), (0, 5)]
    groups: list[LayoutBit] = [(0, 6 + i) for i in range(bit_width(threads) - len(lanes))]
    down = [(0, p) for p in range(6 + len(groups), rows)]
    return DistributedLayout(shape, ((1, 0), (0, 3), *((1, p) for p in range(3, columns)), *down), (*lanes, *groups))


def pack_layout(layout: DistributedLayout) -> DistributedLayout:
    """The layout of `pack_pairs`: one word for each register pair that holds two neighbours of a row."""
    names = {(a, p): (a, p - 1 if a == 1 else p) for a, n in enumerate(layout.shape) for p in range(bit_width(n))}
    del names[1, 0]
    return layout.renamed((layout.shape[0], layout.shape[1] // 2), names)


def make_square_layout(shape: tuple[int, ...], threads: int) -> DistributedLayout:
    """A square of elements in each thread's registers, for products by FMA."""
    row, column = len(shape) - 2, len(shape) - 1
    rows, columns = ([(axis, p) for p in range(bit_width(shape[axis]))] for axis in (row, column))
    outer = [(a, p) for a in reversed(range(row)) for p in range(bit_width(shape[a]))]
    lanes = bit_width(threads)
    held = max(0, len(rows) + len(columns) + len(outer) - lanes)
    vector = min(2, held, len(columns))
    tall = min(len(rows), (held - vector + 1) // 2)
    wide = min(len(columns) - vector, held - vector - tall)
    tall = min(len(rows), held - vector - wide)
    inner: list[LayoutBit] = [*columns[:vector], *rows[:tall], *columns[len(columns) - wide :]]
    rest = [b for b in (*columns, *rows, *outer) if b not in inner]
    across = rest[:lanes]
    return DistributedLayout(shape, (*inner, *rest[lanes:]), (*across, *(None,) * (lanes - len(across))))


def choose_dot_operand_layouts(
    node: Node, held: Callable[[Value], DistributedLayout], direct: bool, threads: int
) -> Sequence[DistributedLayout | None]:
    """The layouts that a product takes its operands in: their own, since they go through shared memory; with `direct`
    the left one is an operand fragment in registers."""
    left, right = node.args[-2:]
    shape = tuple(int(n) for n in left.type.shape)  # type: ignore[union-attr]
    return [make_mma_layout(shape, threads, True) if direct else held(left), held(right)]


# Reduced bits: which index bits of a loaded block its reductions reduce, and layouts with those bits in registers.
# Threads that hold whole columns of what is reduced along another axis than the contiguous one neither shuffle nor meet
# in shared memory, and neighbours in a warp read neighbours in memory.


ReducedBits = frozenset[LayoutBit]
REDUCTIONS = (reduce.sum, reduce.max, reduce.min, reduce.argmax, reduce.argmin)


def static_shape(v: Value) -> Sizes:
    """The static shape of a block."""
    return tuple(int(n) for n in v.type.shape)  # type: ignore[arg-type, union-attr]


def reduction_axes(node: Node) -> tuple[int, ...]:
    """The axes that a reduction reduces, as non-negative numbers."""
    axes, rank = node.attrs["axis"], node.args[0].type.rank  # type: ignore[union-attr]
    return tuple(a % rank for a in ((axes,) if isinstance(axes, int) else axes))


def find_reduced_bits(function: Function, threads: int = 0) -> dict[Value, ReducedBits]:
    """The bits of each loaded block that all reductions of what is computed from it reduce.

    Blocks that are reduced along their last axis are among them only where nothing else reads them, or where each warp
    of so many threads has rows of its own.
    """
    producers = {v: n for n in function.body.walk() for v in n.results}
    found: dict[Value, ReducedBits] = {}
    for node in function.body.walk():
        if node.op not in REDUCTIONS:
            continue
        sizes = static_shape(node.args[0])
        bits = frozenset((a, p) for a in reduction_axes(node) for p in range(bit_width(sizes[a])))
        for v, own in trace_to_loads(producers, node.args[0], bits).items():
            found[v] = found.get(v, own) & own
    uses = UseDef(function) if found else None
    held = threads // WARP_THREADS if threads and not _exchanges_elements(function) else math.inf
    return {
        v: bits
        for v, bits in found.items()
        if bits
        and (
            not reduces_last_axis(static_shape(v), bits)
            or count_warp_rows(static_shape(v), bits) >= held
            or find_final_reductions(uses, v)  # type: ignore[arg-type]
        )
    }


def _exchanges_elements(function: Function) -> bool:
    """Whether some op reads blocks in a layout of its own."""
    return any(n.op in (contractions.dot, matmul_accumulate, shape.permute) for n in function.body.walk())


def count_warp_rows(sizes: Sequence[int], bits: ReducedBits) -> int:
    """The rows of a block whose last axis alone is reduced, if that is longer than a warp is wide; else 0.

    >>> count_warp_rows((4, 100), frozenset((1, p) for p in range(7)))
    4
    """
    last = len(sizes) - 1
    whole = {(last, p) for p in range(bit_width(sizes[last]))} if sizes else set()
    return 1 << sum(map(bit_width, sizes[:-1])) if bits == whole and len(whole) > LANE_BITS else 0


def find_warp_rows(function: Function) -> int:
    """The least rows of the blocks that are reduced along their last axis alone, and read again; 0 without one."""
    if _exchanges_elements(function):
        return 0
    others, found = find_reduced_bits(function), find_reduced_bits(function, 1)
    return min((count_warp_rows(static_shape(v), found[v]) for v in found if v not in others), default=0)


def find_row_threads(function: Function) -> list[int]:
    """The most threads of a team, for each op that reads elements at places of rows: a warp has whole rows."""
    return [WARP_THREADS * math.prod(static_shape(n.out)) for n in function.body.walk() if n.op is element_of_row]


def find_final_reductions(uses: UseDef, value: Value) -> list[Node]:
    """The reductions in which every use of a block ends, after pointwise ops; none where something else reads it."""
    sizes, found, work, seen = static_shape(value), list[Node](), [value], set[Value]()
    while work:
        v = work.pop()
        users = uses.users(v)
        if uses.count_uses(v) != sum(n.args.count(v) for n in users):  # a result of its block
            return []
        for user in users:
            if user.op in REDUCTIONS:
                found.append(user)
            elif not user.op.pointwise or static_shape(user.out) != sizes:
                return []
            elif user.out not in seen:
                seen.add(user.out)
                work.append(user.out)
    return found


def reduces_last_axis(sizes: Sequence[int], bits: ReducedBits) -> bool:
    """Whether some of the bits are of the last axis of more than one element."""
    last = max((a for a, n in enumerate(sizes) if n > 1), default=0)
    return any(a == last for a, _ in bits)


def trace_to_loads(producers: Mapping[Value, Node], value: Value, bits: ReducedBits) -> dict[Value, ReducedBits]:
    """The loads that a block is computed from, element by element, with some of its bits as theirs."""
    found: dict[Value, ReducedBits] = {}
    work, seen = [(value, bits)], {value}
    while work:
        value, bits = work.pop()
        node = producers.get(value)
        if node is None:
            continue
        if node.op in (tile.load, prefetched_load):
            found[value] = bits
        for v in node.args if node.op.pointwise or node.op in (shape.permute, shape.reshape) else ():
            names = _name_source_bits(node, v)
            if names is not None and v not in seen:
                seen.add(v)
                work.append((v, frozenset(names[b] for b in bits if b in names)))
    return found


def _name_source_bits(node: Node, operand: Value) -> Mapping[LayoutBit, LayoutBit] | None:
    """For each bit of a node's result the bit of an operand; None where they do not match."""
    here, there = static_shape(node.out), static_shape(operand)
    if node.op is shape.permute:
        axes = [a % len(here) for a in node.attrs["axes"]]
        return {(new, p): (old, p) for new, old in enumerate(axes) for p in range(bit_width(there[old]))}
    if node.op is shape.reshape:
        return match_reshape_bits(here, there)
    return {(a, p): (a, p) for a, n in enumerate(here) for p in range(bit_width(n))} if here == there else None


def make_reduction_layout(sizes: Sizes, threads: int, vector: int, reduced: ReducedBits) -> DistributedLayout:
    """Blocked layout, but that threads differ in what is reduced only where nothing else is left.

    Where that is along the last axis, the lanes of a warp differ in it: a warp then reduces rows of its own.

    >>> print(make_reduction_layout((4, 8), 8, 1, frozenset([(0, 0), (0, 1)])))
    4x8 registers [0.0 0.1] threads [1.0 1.1 1.2]
    """
    bits = [(a, p) for a in reversed(range(len(sizes))) for p in range(bit_width(sizes[a]))]
    lanes = bit_width(threads)
    inner = min(bit_width(vector), max(0, len(bits) - lanes), bit_width(sizes[-1]) if sizes else 0)
    first = inner + LANE_BITS if reduces_last_axis(sizes, reduced) else inner
    rest = bits[first:]
    ordered = [*bits[:first], *(b for b in rest if b not in reduced), *(b for b in rest if b in reduced)]
    across = ordered[inner : inner + lanes]
    held = (*ordered[:inner], *ordered[inner + lanes :])
    return DistributedLayout(sizes, held, (*across, *(None,) * (lanes - len(across))))


# Thread teams: the threads that work on one tile, and values that each derives from its thread number.
#
# In a kernel without groups all threads of a block work on one tile; in a kernel with groups each thread is a tile.


WARP_THREADS = 32
WARPGROUP_THREADS = 128
CONSUMER_BARRIER = 1  # the named barrier of all consumers, which the producer does not take part in
FIRST_TEAM_BARRIER = 8  # the named barrier of the first of several teams


class ThreadTeam:
    """`threads` threads for each of `group` tiles (one of both numbers is 1), and their common subexpressions.

    A thread block may have several `teams`, each with a program of its own; `thread` is the number in the team.

    `producer_threads` more threads follow them; they hold no part of any block.
    """

    def __init__(self, text: PtxBuilder, threads: int, group: int, producer_threads: int = 0, teams: int = 1) -> None:
        assert 1 in (threads, group)
        self.text, self.threads, self.group, self.teams = text, threads, group, teams
        self.producer_threads = producer_threads
        self.worker_threads = threads * group * teams
        self.block_threads = self.worker_threads + producer_threads
        self._hoisted: dict[tuple[object, ...], str] = {}
        with text.at_entry_head():
            self.block_thread = text.let("mov.u32", "b32", "%tid.x")
            self.thread = (
                self.block_thread if teams == 1 else text.let("and.b32", "b32", self.block_thread, threads - 1)
            )

    @property
    def team_index(self) -> str:
        """The number of this team in its block."""
        return self.hoist(("team",), "shr.u32", "b32", self.block_thread, (self.threads - 1).bit_length())

    def synchronise(self) -> None:
        """Emit a barrier of the team's threads: a named barrier where the block has other threads too."""
        if self.teams > 1:
            barrier = self.hoist(("team barrier",), "add.u32", "b32", self.team_index, FIRST_TEAM_BARRIER)
            self.text.do("bar.sync", barrier, self.threads)
        elif self.producer_threads:
            self.text.do("bar.sync", CONSUMER_BARRIER, self.threads)
        else:
            self.text.do("bar.sync", 0)

    def hoist(self, key: tuple[object, ...], instruction: str, kind: str, *operands: object) -> str:
        """The result of an instruction on loop-invariant operands, emitted once at the head of the entry."""
        if key not in self._hoisted:
            with self.text.at_entry_head():
                self._hoisted[key] = self.text.let(instruction, kind, *operands)
        return self._hoisted[key]

    def has_hoisted(self, key: tuple[object, ...]) -> bool:
        """Whether `hoist` has emitted the instruction of this key."""
        return key in self._hoisted

    def thread_offset(self, layout: DistributedLayout, axis: int) -> str:
        """The index of a thread's first element along an axis: "0", or a 32-bit register."""
        bits = [(i, bit[1]) for i, bit in enumerate(layout.threads) if bit is not None and bit[0] == axis]
        if not bits:
            return "0"
        key = ("thread offset", tuple(bits))
        if key not in self._hoisted:
            with self.text.at_entry_head():
                self._hoisted[key] = self._gather_bits(bits)
        return self._hoisted[key]

    def _gather_bits(self, bits: list[tuple[int, int]]) -> str:
        """Move bits of the thread number to their positions, adjacent bits together."""
        total = ""
        for source, target, length in _find_bit_runs(bits):
            part = self._extract_bits(source, length)
            part = self.text.let("shl.b32", "b32", part, target) if target else part
            total = self.text.let("or.b32", "b32", total, part) if total else part
        return total

    def _extract_bits(self, start: int, length: int) -> str:
        """A bit field of the thread number."""
        shifted = self.text.let("shr.u32", "b32", self.thread, start) if start else self.thread
        if start + length >= (self.threads - 1).bit_length():
            return shifted
        return self.text.let("and.b32", "b32", shifted, (1 << length) - 1)

    def axis_predicate(self, layout: DistributedLayout, axis: int, offset: int) -> str:
        """The predicate that `offset` past a thread's first element is inside the block's axis; "" if it always is."""
        size = layout.shape[axis]
        # Offsets that differ only below the size's largest power-of-two factor share a predicate.
        offset -= offset % (size & -size)
        if layout.max_thread_offset(axis) + offset < size:
            return ""
        thread = self.thread_offset(layout, axis)
        return self.hoist(("within", thread, size - offset), "setp.lt.s32", "pred", thread, size - offset)

    def bounds_predicates(self, layout: DistributedLayout, offsets: Iterable[int]) -> list[str]:
        """The predicates, where any are needed, that an element is inside the block rather than padding."""
        found = [self.axis_predicate(layout, axis, offset) for axis, offset in enumerate(offsets)]
        return [each for each in found if each]

    def owner_predicate(self, layout: DistributedLayout) -> str:
        """The predicate of the first thread among those that hold the same elements; "" where none are replicated."""
        replicated = sum(1 << i for i in layout.replicated_bits)
        if not replicated:
            return ""
        bits = self.hoist(("replica", replicated), "and.b32", "b32", self.thread, replicated)
        return self.hoist(("owner", replicated), "setp.eq.s32", "pred", bits, 0)

    def first_thread_predicate(self) -> str:
        """The predicate of the first thread of the team; in a kernel with groups, of the block."""
        return self.hoist(("first",), "setp.eq.u32", "pred", self.thread, 0)

    def tile_leader_predicate(self) -> str:
        """The predicate of the one thread that acts for a tile; "" where each thread is a tile."""
        return self.first_thread_predicate() if self.threads > 1 else ""

    def constant_predicate(self, value: bool) -> str:
        """A predicate that is always true, or always false."""
        return self.hoist(("constant", value), f"setp.{'ge' if value else 'lt'}.u32", "pred", self.thread, 0)


def _find_bit_runs(bits: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Runs of bits that are adjacent in source and target: source, target, length."""
    runs: list[tuple[int, int, int]] = []
    for source, target in sorted(bits):
        if runs and (source, target) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
        else:
            runs.append((source, target, 1))
    return runs


def and_predicates(text: PtxBuilder, *predicates: str) -> str:
    """The conjunction of predicates; "" is always true."""
    total = ""
    for each in predicates:
        total = text.let("and.pred", "pred", total, each) if total and each else total or each
    return total
