"""Gradients of weights of convolutions, whose windows are read in place (`tessera.stdlib.indirect_convolution`).

The gradient of weights is the product of the results' gradient and of the transposed windows, summed over the images. A
program contracts the windows of several images, so that no product of one image is in memory: its rows are elements of
windows, its lanes outputs.

That of a depthwise convolution is a sum for each element of the window, of the gradient times the image shifted by it.
On a GPU one program adds up all of them for some channels and positions, so that it loads the gradient once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import TensorType, bf16, f16, f32, f64
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape
from tessera.stdlib.convolution import WindowProduct, find_stacked_windows
from tessera.stdlib.gemm import zero_accumulator
from tessera.stdlib.indirect_convolution import (
    MOST_INDEXED,
    IndirectConvolution,
    choose_places,
    count_first,
    divide_depth,
    find_places,
    pack_rows,
)

# mypy: disable-error-code="operator, attr-defined, index"


@kernel
def multiply_elements(image, gradient, depths, out, *, windows, BR, BK):
    """out [S, G, O, K] = the sums over each of S parts of the images of gradient [B · G, blocks of O, P, BO] times the
    transposed windows of image [elements], on the grid (S · G, blocks of K, blocks of O)."""
    groups, places, images = out.shape[1], gradient.shape[2], windows["images"]
    part, group = tile.program_id(0) // groups, tile.program_id(0) % groups
    k, block = tile.program_id(1) * BR, tile.program_id(2)
    elements = tile.load(depths[k : k + BR], edge="clip") + group * windows["group"]
    rest = count_first(places, BK)
    total = zero_accumulator(gradient, (BR, gradient.shape[3]))
    for z in tile.range(part * images, tile.minimum(part * images + images, windows["count"]), 1):
        first = elements + z * windows["image"]
        if rest:
            total = total + multiply_windows_at(image, gradient, first, z * groups + group, block, 0, windows, rest)
        for p in tile.range(rest, places, BK):
            total = total + multiply_windows_at(image, gradient, first, z * groups + group, block, p, windows, BK)
    o = block * gradient.shape[3]
    tile.store(out[part, group, o : o + gradient.shape[3], k : k + BR], tile.transpose(total), edge="clip")


def multiply_windows_at(image, gradient, elements, matrix, block, p, windows, BK):
    """The products of the windows p to p + BK."""
    seen = tile.load(image[elements[:, None] + find_places(p, windows, BK)[None, :]])
    return tile.dot(seen, gradient[matrix, block, p : p + BK, :])


PROGRAMS = 16  # parts of the images are summed apart where there are fewer programs


@dataclass(frozen=True)
class WindowGradient:
    """The product of a gradient [B, G, O, P] and of transposed windows, summed over the images if `whole`."""

    convolution: IndirectConvolution
    gradient: Value
    whole: bool

    @property
    def operands(self) -> tuple[Value, Value]:
        """The image and the gradient."""
        return self.convolution.product.windows.image, self.gradient

    def compute(self, image: Tensor, gradient: Tensor) -> Tensor:
        """The product as [B, G, O, C · taps], or its sum over B as [G, O, C · taps]."""
        own = self.convolution
        batch, groups, outputs, places = own.product.result
        sizes = (1, 1, *(int(n) for n in image.shape[2:]))[-3:]
        steps = math.prod(sizes), sizes[1] * sizes[2], sizes[2], 1
        rows = choose_places(own.window)
        packed = pack_rows(shape.reshape(gradient, shape=(batch * groups, outputs, places)), own.output_block)
        across = ceil_divide(own.window, rows), packed.shape[1]
        images = ceil_divide(batch, ceil_divide(PROGRAMS, groups * math.prod(across))) if self.whole else 1
        parts = ceil_divide(batch, images)
        size = math.prod(image.shape[1:])
        windows = {"counts": (1, *own.counts), "images": images, "count": batch, "image": size}
        windows |= {"group": own.channels * steps[0]}
        windows["moves"] = size, *(a * b for a, b in zip(own.strides, steps[1:], strict=True))
        memory = OutputMemory(TensorType((parts, groups, outputs, own.window), image.dtype))
        depths = basic.fusion_barrier(own.find_window_depths(steps))  # each program would compute them
        image = shape.reshape(image, shape=(-1,))
        grid = parts * groups, *across
        blocks = {"BR": rows, "BK": divide_depth(places)}
        sums = launch(multiply_elements, grid, image, packed, depths, memory, windows=windows, **blocks)
        return reduce.sum(sums, axis=(0,), keepdims=False) if self.whole else sums


def match_window_gradient(uses: UseDef, node: Node) -> WindowGradient | None:
    """A sum over images of a product with transposed windows, or such a product, as a gradient; or None."""
    whole = node.op is reduce.sum
    dot = uses.find(node.args[0], contractions.dot) if whole else node
    if dot is None or (whole and not _sums_images(node)):
        return None
    types = [get_tensor_type(v) for v in (*dot.args, dot.out, node.out)]
    if any(t.policy is not None or t.dtype != types[0].dtype for t in types) or types[0].dtype not in (f32, f64):
        return None
    turned = uses.find(dot.args[1], shape.permute)
    sizes = [get_shape(v) for v in (*dot.args, dot.out)]
    if turned is None or tuple(turned.attrs["axes"]) != (0, 1, 3, 2) or any(len(s) != 4 for s in sizes):
        return None
    windows = find_stacked_windows(uses, turned.args[0])
    if windows is None or not all(isinstance(n, int) and n for s in (*sizes, get_shape(windows.image)) for n in s):
        return None
    batch, groups, outputs, places = (int(n) for n in sizes[0])
    if get_shape(windows.image)[0] != batch or math.prod(map(int, get_shape(windows.image))) >= MOST_INDEXED:
        return None
    product = WindowProduct(windows, dot.out, groups, (batch, groups, outputs, places), None)
    return WindowGradient(IndirectConvolution(product, None), dot.args[0], whole)


def _sums_images(node: Node) -> bool:
    """Whether a sum of four axes is one over the first."""
    axes = tuple(a % len(get_shape(node.args[0])) for a in node.attrs["axis"])
    return axes == (0,) and not node.attrs["keepdims"]


@kernel
def sum_shifted(image, gradient, out, *, shifts, counts, strides, sizes, depth, BP, BC):
    """out [S, T, C] = for each s the sums over the positions s · depth to (s + 1) · depth, of all images, of gradient
    times image, shifted by each of the T `shifts`, on the grid (S, blocks of C); all arrays are flat but `out`.

    `counts` are the positions of an image along three axes, `strides` theirs in its memory, and `sizes` the elements of
    an image, of a gradient, and between two channels of each and two positions of a gradient.
    """
    channels, places = out.shape[2], counts[0] * counts[1] * counts[2]
    c = tile.cast(tile.program_id(1) * BC + tile.arange(0, BC), "int32")
    start = tile.program_id(0) * depth
    end = tile.minimum(start + depth, gradient.shape[0] // channels)
    totals = [tile.zeros((BP, BC), out.dtype) for _ in tile.static_range(len(shifts))]
    for q in tile.range(start, end, BP):
        number = tile.cast(q + tile.arange(0, BP), "int32")
        inside = (number < end)[:, None] & (c < channels)[None, :]
        z, p = number // places, number % places
        line = p // counts[2]
        first = line // counts[1] * strides[0] + line % counts[1] * strides[1] + p % counts[2] * strides[2]
        first = tile.where(number < end, z * sizes[0] + first, 0)[:, None] + (c * sizes[2])[None, :]
        at = (z * sizes[1] + p * sizes[4])[:, None] + (c * sizes[3])[None, :]
        factor = tile.cast(tile.load(gradient[at], mask=inside), out.dtype)
        seen = [tile.load(image[first + shifts[t]], mask=inside) for t in tile.static_range(len(shifts))]
        totals = [totals[t] + factor * tile.cast(seen[t], out.dtype) for t in tile.static_range(len(shifts))]
    for t in tile.static_range(len(shifts)):
        tile.store(out[tile.program_id(0), t, c], tile.sum(totals[t], axis=0), mask=c < channels)


@kernel
def sum_shifted_rows(image, gradient, out, *, width, shifts, steps, depth, BR, BX, BC):
    """As `sum_shifted`, of an image [B, Z, Y, X, C] and a gradient [B, Z', Y', X', C], on the grid (S, blocks of C, T /
    `width`): the sums of a program have one of the `shifts` along Z and Y, and the same `width` ones along X.

    Each s has `depth` blocks of BR rows. A thread holds BX positions of a row, so that it loads an element of the image
    once for all shifts along X. `steps` are those between positions along Z and Y.
    """
    counts, c, own = gradient.shape, tile.program_id(1) * BC, tile.program_id(2)
    start = tile.program_id(0) * depth
    end = tile.minimum(start + depth, counts[0] * counts[1] * counts[2] // BR)
    z, y, gaps = 0, 0, [n - shifts[2][0] for n in shifts[2]]
    for t in tile.static_range(len(shifts[0])):
        z, y = tile.where(own == t, shifts[0][t], z), tile.where(own == t, shifts[1][t], y)
    totals = [tile.zeros((BR, BC), out.dtype) for _ in tile.static_range(width)]
    for block in tile.range(start, end, 1):
        row = block * BR
        b, i, j = row // counts[2] // counts[1], row // counts[2] % counts[1], row % counts[2]
        top = j * steps[1] + y
        for x in tile.range(0, counts[3], BX):
            seen = [
                tile.load(image[b, i * steps[0] + z, top : top + BR, x + n, c : c + BC], edge="clip")
                for n in tile.static_range(shifts[2][0], BX + shifts[2][width - 1])
            ]
            for n in tile.static_range(BX):
                factor = tile.cast(tile.load(gradient[b, i, j : j + BR, x + n, c : c + BC], edge="clip"), out.dtype)
                totals = [
                    totals[t] + factor * tile.cast(seen[n + gaps[t]], out.dtype) for t in tile.static_range(width)
                ]
    for t in tile.static_range(width):
        tile.store(out[tile.program_id(0), own * width + t, c : c + BC], tile.sum(totals[t], axis=0), edge="clip")


LEAST_SHIFTS = 4  # sums of which one kernel is faster than fused reductions
LANES, ROW_CHANNELS = 256, (32, 16, 8)  # elements of a block, and its channels where these lie together in memory
MOST_POSITIONS, LEAST_POSITIONS = 8, 4  # of a row that a thread holds
ROW_PROGRAMS = 4224  # programs of one warp that keep a GPU busy
SUMMING_PROGRAMS = 1056  # programs of many sums that keep a GPU busy; of few sums, with fewer threads, more do
FEW_SHIFTS = 36


@dataclass(frozen=True)
class ShiftedSum:
    """The sum over all axes but one of a gradient times a slice of an image."""

    gradient: Value
    image: Value
    axis: int
    start: tuple[int, ...]
    step: tuple[int, ...]


@dataclass(frozen=True)
class ShiftedRows:
    """Shifts along Z and Y, and along X, which all of the former have; and the blocks of a program that sums them."""

    shifts: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    rows: int
    positions: int
    channels: int


@dataclass(frozen=True)
class ShiftedSums:
    """Such sums for several slices, along an axis of a result."""

    terms: tuple[ShiftedSum, ...]
    sizes: tuple[int, ...]  # of the gradient
    result: TensorType
    along: int

    @property
    def operands(self) -> tuple[Value, Value]:
        """The image and the gradient."""
        return self.terms[0].image, self.terms[0].gradient

    @property
    def _spatial(self) -> list[int]:
        return [i for i in range(1, len(self.sizes)) if i != self.terms[0].axis]

    def compute(self, image: Tensor, gradient: Tensor) -> Tensor:
        """The sums, side by side."""
        rows = self._find_rows()
        sums = self._sum_positions(image, gradient) if rows is None else self._sum_rows(image, gradient, rows)
        sums = reduce.sum(sums, axis=(0,), keepdims=False)
        before = math.prod(self.result.shape[: self.along])
        return shape.reshape(sums if before == 1 else shape.permute(sums, axes=(1, 0)), shape=self.result.shape)

    def _divide(self, count: int, across: int, block: int, programs: int) -> tuple[int, OutputMemory]:
        """How much of a count, in blocks, a program adds up, and the memory for the sums of all."""
        depth = round_up(ceil_divide(count, max(1, programs // across)), block)
        sizes = ceil_divide(count, depth), len(self.terms), self.sizes[self.terms[0].axis]
        return depth, OutputMemory(TensorType(sizes, self.result.dtype))

    def _find_rows(self) -> ShiftedRows | None:
        """How the sums are those of neighbours in rows whose channels lie together; None where they are not."""
        first, missing = self.terms[0], (0,) * (5 - len(self.sizes))
        if first.axis != len(self.sizes) - 1 or first.step[-2] != 1:
            return None
        starts = [(*missing, *t.start[1:-1]) for t in self.terms]
        gaps = tuple(sorted({x for *_, x in starts}))
        lines = [tuple(line) for *line, _ in starts[:: len(gaps)]]
        positions = max(n for n in range(1, MOST_POSITIONS + 1) if self.sizes[-2] % n == 0)
        alike = starts == [(*line, x) for line in lines for x in gaps]
        if not alike or positions < min(LEAST_POSITIONS, self.sizes[-2]):
            return None
        channels = min(ROW_CHANNELS, key=lambda n: round_up(self.sizes[-1], n))
        height = self.sizes[-3] if len(self.sizes) > 3 and first.step[-3] == 1 else 1
        rows = max(n for n in range(1, LANES // channels + 1) if height % n == 0)
        return ShiftedRows((tuple(z for z, _ in lines), tuple(y for _, y in lines), gaps), rows, positions, channels)

    def _sum_rows(self, image: Tensor, gradient: Tensor, how: ShiftedRows) -> Tensor:
        missing, across = (1,) * (5 - len(self.sizes)), ceil_divide(self.sizes[-1], how.channels)
        padded = [
            shape.reshape(x, shape=(x.shape[0], *missing, *(int(n) for n in x.shape[1:]))) for x in (image, gradient)
        ]
        lines, blocks = len(how.shifts[0]), math.prod(self.sizes[:-2]) // how.rows
        depth, memory = self._divide(blocks, across * lines, 1, ROW_PROGRAMS)
        grid, steps = (memory.type.shape[0], across, lines), (*missing, *self.terms[0].step[1:-1])[:2]
        numbers = {"width": len(how.shifts[2]), "shifts": how.shifts, "steps": steps, "depth": depth}
        sizes = {"BR": how.rows, "BX": how.positions, "BC": how.channels}
        return launch(sum_shifted_rows, grid, *padded, memory, **numbers, **sizes)

    def _sum_positions(self, image: Tensor, gradient: Tensor) -> Tensor:
        term, spatial, strides = self.terms[0], self._spatial, _find_strides(image.shape)
        channels, counts, last = (
            self.sizes[term.axis],
            [self.sizes[i] for i in spatial],
            term.axis == len(self.sizes) - 1,
        )
        places, missing = math.prod(counts), 3 - len(spatial)
        block = min(ROW_CHANNELS, key=lambda n: round_up(channels, n)) if last else 1
        block = block if last else max(1, LANES // max(32, 1 << (places - 1).bit_length()))
        across = ceil_divide(channels, block)
        programs = SUMMING_PROGRAMS * max(1, FEW_SHIFTS // len(self.terms))
        depth, memory = self._divide(self.sizes[0] * places, across, LANES // block, programs)
        numbers = {
            "shifts": tuple(sum(s * t for s, t in zip(t.start, strides, strict=True)) for t in self.terms),
            "counts": (1,) * missing + tuple(counts),
            "strides": (0,) * missing + tuple(strides[i] * term.step[i] for i in spatial),
            "sizes": (strides[0], channels * places, strides[term.axis], *((1, channels) if last else (places, 1))),
        }
        flat = (shape.reshape(x, shape=(-1,)) for x in (image, gradient))
        grid = memory.type.shape[0], across
        return launch(sum_shifted, grid, *flat, memory, **numbers, depth=depth, BP=LANES // block, BC=block)


def _find_strides(sizes: Sequence[Any]) -> list[int]:
    return [math.prod(map(int, sizes[i + 1 :])) for i in range(len(sizes))]


def match_shifted_sums(uses: UseDef, node: Node) -> ShiftedSums | None:
    """A concatenation of sums of one gradient times slices of one image; None where it is none, or too short."""
    out, along = get_tensor_type(node.out), node.attrs["axis"] % len(get_shape(node.out))
    plain = out.dtype == f32 and out.policy is None and all(isinstance(n, int) and n for n in out.shape)
    if not plain or not LEAST_SHIFTS <= len(node.args) == out.shape[along]:
        return None
    terms = [_match_shifted_sum(uses, v) for v in node.args]
    found = [t for t in terms if t is not None]
    alike = {(t.gradient, t.image, t.axis, t.step) for t in found}
    if len(found) != len(terms) or len(alike) != 1:
        return None
    sizes = tuple(int(n) for n in get_shape(found[0].gradient))
    count = sizes[found[0].axis]
    if out.shape.count(1) < len(out.shape) - 2 or math.prod(out.shape) != count * len(terms):
        return None
    return ShiftedSums(tuple(found), sizes, out, along)


def _match_shifted_sum(uses: UseDef, value: Value) -> ShiftedSum | None:
    while (node := uses.find(value, shape.reshape)) is not None:
        value = node.args[0]
    total = uses.find(value, reduce.sum)
    if total is None or get_tensor_type(total.out).policy is not None:
        return None
    moves, value = [], total.args[0]
    while (node := uses.get(value)) is not None and node.op in (shape.reshape, shape.permute):
        moves.append(node)
        value = node.args[0]
    product = uses.find(value, elementwise.mul)
    if product is None or get_tensor_type(product.out).dtype != f32 or not 3 <= len(get_shape(value)) <= 5:
        return None
    axis = _find_kept_axis(total, moves[::-1], get_shape(value))
    cut, other = (uses.find(v, shape.slice_) for v in product.args)
    factor = product.args[1] if cut is not None else product.args[0]
    cut = cut or other
    if axis is None or cut is None or not all(_is_whole(cut, i) for i in (0, axis)):
        return None
    image, gradient = (_take_narrow(uses, v) for v in (cut.args[0], factor))
    sizes = (*get_shape(image), *get_shape(gradient))
    types = [get_tensor_type(v) for v in (image, gradient)]
    if not all(isinstance(n, int) and n for n in sizes) or any(t.dtype not in NARROW or t.policy for t in types):
        return None
    if max(math.prod(map(int, t.shape)) for t in types) >= MOST_INDEXED or types[1].shape != get_shape(value):
        return None
    return ShiftedSum(gradient, image, axis, tuple(cut.attrs["start"]), tuple(cut.attrs["step"]))


NARROW = (f16, bf16, f32)


def _take_narrow(uses: UseDef, value: Value) -> Value:
    node = uses.find(value, basic.cast)
    return node.args[0] if node is not None and get_tensor_type(node.args[0]).dtype in NARROW else value


def _is_whole(cut: Node, axis: int) -> bool:
    start, stop, step = (cut.attrs[name][axis] for name in ("start", "stop", "step"))
    return (start, stop, step) == (0, get_shape(cut.args[0])[axis], 1)


def _find_kept_axis(total: Node, moves: Sequence[Node], sizes: Sequence[Any]) -> int | None:
    """The second or last axis of a product that alone a sum keeps, to which its elements are moved; or None."""
    for axis in {1, len(sizes) - 1}:
        at: int | None = axis
        for node in moves:
            at = _move_axis(node, at) if at is not None else None
        summed = {a % len(get_shape(total.args[0])) for a in total.attrs["axis"]}
        rest = set(range(len(get_shape(total.args[0])))) - summed
        if at is not None and rest - {i for i in rest if get_shape(total.args[0])[i] == 1} == {at}:
            return axis
    return None


def _move_axis(node: Node, axis: int) -> int | None:
    """The axis of a permutation's or reshape's result that is an axis of its operand; None where there is none."""
    if node.op is shape.permute:
        return tuple(a % len(node.attrs["axes"]) for a in node.attrs["axes"]).index(axis)
    before, after = get_shape(node.args[0]), get_shape(node.out)
    lead = math.prod(before[:axis])
    return next((i for i, n in enumerate(after) if n == before[axis] and math.prod(after[:i]) == lead), None)
