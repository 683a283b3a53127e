"""Gradients of the weights of convolutions as products with a shifted image (implicit GEMM, as in cuDNN).

The image and the results' gradient are written into one grid of positions: behind each line, each plane and each image
there are as many zeros as the padding has, which are the padding before the next one, too. The gradient has zeros where
no window begins. Then the gradient of a tap of the window is one product over all positions of all images, in which the
image is shifted by the same number of positions everywhere: [O, positions] · [positions + shift, C]. No window is ever
in memory. Tensor maps begin at whole units of 16 bytes along rows of memory, but at any row: the rows of the shifted
image are positions, and a copy that adds the zeros turns an image whose rows are lines. Windows with strides see one
phase of the image at each tap: phases are columns of the image side by side.

The positions are cut into parts until their products fill a GPU, and the sums are added up in f32, in the order of the
parts. The zeros of the gradient meet elements of the image that no window has there, and 0 times an infinity is NaN:
sums that are not finite are computed again, over the windows alone.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tessera.core.symbolic_dim import ceil_divide, round_up
from tessera.core.types import DType, TensorType, f32
from tessera.frontend.kernel import kernel
from tessera.frontend.kernel.graph_launch import OutputMemory, launch
from tessera.frontend.kernel.tile_api import tile
from tessera.ir.core import Node, Value
from tessera.ir.rewrite import UseDef
from tessera.ir.tensor import Tensor
from tessera.lower.indexing_maps import get_shape, get_tensor_type
from tessera.lower.lowering_plan import BLOCK_RATES, EVEN_BLOCKS, STEP_SECONDS, LoweringPlan, estimate_waves
from tessera.ops.tensor import basic, shape
from tessera.stdlib.convolution import StackedWindows, resize
from tessera.stdlib.indirect_gradients import match_window_gradient
from tessera.stdlib.split_products import (
    ALIGNMENT,
    BF16_RATE,
    BUSY_PROGRAMS,
    LAUNCH_SECONDS,
    MEMORY_RATE,
    find_narrow_type,
    has_nonfinite,
    join_sums,
)

# mypy: disable-error-code="operator, attr-defined, index"

AXES = 3  # spatial axes of the kernels
ROUND = 64  # positions that a round contracts
PLACED_ELEMENTS, PLACED_COLUMNS = 2048, 256  # of the block that a program places in a grid
CHECKED, CHECKED_POSITIONS = 16, 16  # rows and columns of the block of results that a program checks, and of a round
CHECKED_TAPS = 16  # taps of such a block, at most
TURNED_CHANNELS, TURNED_ELEMENTS = 64, 4096  # of the block whose channels become columns
MOST_PARTS, LEAST_ROUNDS = 64, 4  # of the positions; of the rounds of a part
# Bytes a second at which elements are placed in a grid, by the elements that a thread moves at once.
PLACE_RATES = {1: 1.2e12, 2: 2e12, 4: 3e12, 8: 3e12}
TURN_RATE, PHASES_RATE = 2e12, 1e12  # the same where channels become columns, and where phases do
WINDOWS_RATE = 0.35e12  # bytes a second of windows that are written and read


@kernel
def place_in_grid(x, out, *, BA, BF, BG):
    """out [A, B, E', F', G'] = x [B, A, E, F, G] with zeros behind E, F and G, on the grid (B · E', blocks of A, blocks
    of F' · G')."""
    b, e, a = tile.program_id(0) // out.shape[2], tile.program_id(0) % out.shape[2], tile.program_id(1) * BA
    across = tile.cdiv(out.shape[4], BG)
    f, g = tile.program_id(2) // across * BF, tile.program_id(2) % across * BG
    block = tile.load(x[b, a : a + BA, e, f : f + BF, g : g + BG], edge="clip")
    tile.store(out[a : a + BA, b, e, f : f + BF, g : g + BG], block, edge="clip")


@kernel
def place_turned(x, out, *, BC, BF, BG):
    """out [B, E', F', G', C'] = x [B, C, E, F, G] with channels as columns, and zeros behind each axis, on the grid
    (B · E', blocks of C', blocks of F' · G')."""
    b, e, c = tile.program_id(0) // out.shape[1], tile.program_id(0) % out.shape[1], tile.program_id(1) * BC
    across = tile.cdiv(out.shape[3], BG)
    f, g = tile.program_id(2) // across * BF, tile.program_id(2) % across * BG
    lines = tile.transpose(tile.load(x[b, c : c + BC, e, f : f + BF, g : g + BG], edge="clip"), 0, 1)
    tile.store(out[b, e, f : f + BF, g : g + BG, c : c + BC], tile.transpose(lines), edge="clip")


def find_shift(tap, shifts):
    """The positions by which a tap shifts the image, and the first column of its phase of the image."""
    (_, across, along), gaps, strides, steps = shifts["taps"], shifts["gaps"], shifts["strides"], shifts["steps"]
    i, j, k = tap // (across * along) * gaps[0], tap // along % across * gaps[1], tap % along * gaps[2]
    phase = (i % strides[0] * strides[1] + j % strides[1]) * strides[2] + k % strides[2]
    shift = i // strides[0] * steps[0] + j // strides[1] * steps[1] + k // strides[2] - shifts["lead"]
    return shift, phase * shifts["width"]


def load_positions(x, row, position, turned, rows, positions):
    """A block of x [rows, positions], or [positions, rows] if turned; what is outside is 0."""
    if turned:
        return tile.transpose(tile.load(x[position : position + positions, row : row + rows], edge="clip"))
    return tile.load(x[row : row + rows, position : position + positions], edge="clip")


@kernel
def multiply_shifted(a, b, out, *, turned_a, turned_b, moves_a, shifts, depth, BM, BN, BK):
    """out [S, T, M, N] = for each s and each tap the product of a [M, P] and b [N, P] over the positions s · depth to
    (s + 1) · depth, where the tap shifts `a` if `moves_a`, else `b`; on the grid (S · T, blocks of M, blocks of N).

    `a` is [P, M] if turned; likewise `b`. `shifts` are the numbers of `find_shift`.
    """
    part, tap = tile.program_id(0) // out.shape[1], tile.program_id(0) % out.shape[1]
    i, j, first = tile.program_id(1) * BM, tile.program_id(2) * BN, part * depth
    shift, column = find_shift(tap, shifts)
    (row_a, start_a), (row_b, start_b) = (i, first), (j + column, first + shift)
    if moves_a:
        (row_a, start_a), (row_b, start_b) = (i + column, first + shift), (j, first)
    total = tile.zeros((BM, BN), "f32")
    for k in tile.range(0, depth, BK):
        left = load_positions(a, row_a, start_a + k, turned_a, BM, BK)
        total = total + tile.dot(left, tile.transpose(load_positions(b, row_b, start_b + k, turned_b, BN, BK)))
    tile.store(out[part, tap, i : i + BM, j : j + BN], total, edge="clip")


@kernel
def check_shifted(sums, a, b, out, *, turned_a, turned_b, moves_a, shifts, images, counts, pitches, B, BT, BK):
    """out [O, C, T] = the sum of sums [S, T, M, N], or where a block of it is not finite the products over the windows
    alone; on the grid (blocks of M, blocks of N, blocks of T). If `moves_a`, M is C, else O.

    Windows are those of `counts` lines and places that begin in a plane of `pitches` lines and places, in each image.
    """
    i, j, t = tile.program_id(0) * B, tile.program_id(1) * B, tile.program_id(2) * BT
    total = tile.load(sums[0, t : t + BT, i : i + B, j : j + B], edge="clip")
    for part in tile.static_range(1, sums.shape[0]):
        total = total + tile.load(sums[part, t : t + BT, i : i + B, j : j + B], edge="clip")
    wrong = has_nonfinite(total)
    for tap in tile.range(t, tile.where(wrong, tile.minimum(t + BT, sums.shape[1]), t), 1):
        product = tile.zeros((B, B), "f32")
        shift, column = find_shift(tap, shifts)
        row_a, row_b = (i + column, j) if moves_a else (i, j + column)
        for line in tile.range(0, images * counts[0] * counts[1], 1):
            z, d, h = line // (counts[0] * counts[1]), line // counts[1] % counts[0], line % counts[1]
            start = ((z * pitches[0] + d) * pitches[1] + h) * pitches[2]
            for w in tile.range(0, counts[2], BK):
                first, moved, inside = start + w, start + w + shift, (w + tile.arange(0, BK) < counts[2])[None, :]
                start_a, start_b = (moved, first) if moves_a else (first, moved)
                left = tile.where(inside, load_positions(a, row_a, start_a, turned_a, B, BK), 0.0)
                right = tile.where(inside, load_positions(b, row_b, start_b, turned_b, B, BK), 0.0)
                product = product + tile.dot(left, tile.transpose(right))
        total = tile.where((t + tile.arange(0, BT) == tap)[:, None, None], product[None, :, :], total)
    moved = tile.transpose(total, 0, 2) if moves_a else tile.transpose(tile.transpose(total, 0, 1))
    o, c = (j, i) if moves_a else (i, j)
    tile.store(out[o : o + B, c : c + B, t : t + BT], moved, edge="clip")


@dataclass(frozen=True)
class PlacedOperand:
    """An image [B, C, D, H, W] or [B, D, H, W, C] (`last`) of 16-bit floats, and its padding along three axes."""

    value: Value
    last: bool
    channels: int
    sizes: tuple[int, ...]  # D, H, W
    low: tuple[int, ...] = (0, 0, 0)
    high: tuple[int, ...] = (0, 0, 0)

    def place(self, x: Tensor, batch: int, grid: tuple[int, ...], moves: bool) -> Tensor:
        """The image in a grid, as [C, positions]; as [positions, C'] where channels are last, or if it `moves`."""
        wide = round_up(self.channels, ALIGNMENT)
        if not self.last:
            image = shape.reshape(x, shape=(batch, self.channels, *self.sizes))
            return _place_turned(image, (*grid, wide)) if moves else _place(image, grid, (self.channels, -1))
        depth, height, width = self.sizes
        if wide == self.channels:  # lines are rows of elements, of all channels
            lines = shape.reshape(x, shape=(batch, 1, depth, height, width * wide))
            return _place(lines, (*grid[:2], grid[2] * wide), (-1, wide))
        images = shape.reshape(x, shape=(batch * depth, 1, height, width, self.channels))
        return _place(images, (*grid[1:], wide), (-1, wide))

    def place_phases(self, x: Tensor, batch: int, grid: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """The image with its padding as [positions, phases · C'] of a grid: a phase has every n-th position."""
        first, sizes = (1 if self.last else 2), [n * s for n, s in zip(grid, strides, strict=True)]
        channels = round_up(self.channels, ALIGNMENT)
        x = shape.reshape(x, shape=(batch, *self.sizes, -1) if self.last else (batch, -1, *self.sizes))
        low = [0] * x.ndim
        low[first : first + AXES] = self.low
        x = shape.pad(x, low=tuple(low), high=(0,) * x.ndim, value=0) if any(low) else x
        x = resize(x, (batch, *sizes, channels) if self.last else (batch, channels, *sizes))
        apart = tuple(itertools.chain(*zip(grid, strides, strict=True)))
        x = shape.reshape(x, shape=(batch, *apart, channels) if self.last else (batch, channels, *apart))
        places, phases = (range(first + n, first + 2 * AXES, 2) for n in (0, 1))
        x = shape.permute(x, axes=(0, *places, *phases, x.ndim - 1 if self.last else 1))
        return shape.reshape(x, shape=(-1, math.prod(strides) * channels))


def _place(x: Tensor, sizes: tuple[int, ...], result: tuple[int, int]) -> Tensor:
    """x [B, A, E, F, G] as [A, B, *sizes], with zeros behind each axis, then in the shape of the result."""
    batch, rows = int(x.shape[0]), int(x.shape[1])
    if tuple(x.shape[2:]) == tuple(sizes) and 1 in (batch, rows):
        return shape.reshape(x, shape=result)
    columns = min(PLACED_COLUMNS, 1 << (sizes[2] - 1).bit_length())
    lines = min(PLACED_ELEMENTS // columns, 1 << (sizes[1] - 1).bit_length())
    across = min(PLACED_ELEMENTS // (columns * lines), 1 << (rows - 1).bit_length())
    grid = batch * sizes[0], ceil_divide(rows, across), ceil_divide(sizes[1], lines) * ceil_divide(sizes[2], columns)
    memory = OutputMemory(TensorType((rows, batch, *sizes), x.dtype))
    return shape.reshape(launch(place_in_grid, grid, x, memory, BA=across, BF=lines, BG=columns), shape=result)


def _place_turned(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """x [B, C, E, F, G] as [positions, C'] of a grid."""
    batch, (planes, lines, places, channels) = int(x.shape[0]), sizes
    across = min(TURNED_CHANNELS, 1 << (channels - 1).bit_length())
    columns = min(TURNED_CHANNELS, 1 << (places - 1).bit_length())
    height = min(TURNED_ELEMENTS // (across * columns), 1 << (lines - 1).bit_length())
    blocks = ceil_divide(channels, across), ceil_divide(lines, height) * ceil_divide(places, columns)
    memory = OutputMemory(TensorType((batch, *sizes), x.dtype))
    placed = launch(place_turned, (batch * planes, *blocks), x, memory, BC=across, BF=height, BG=columns)
    return shape.reshape(placed, shape=(-1, channels))


@dataclass(frozen=True)
class TapProducts:
    """How the products of all taps are computed: in blocks, as [C, O] if `swapped`, and in parts of the positions."""

    rows: int
    columns: int
    swapped: bool
    parts: int

    def estimate_seconds(self, taps: int, outputs: int, channels: int, positions: int) -> float:
        """The seconds of the waves of programs, and of adding up the sums of parts."""
        m, n = (channels, outputs) if self.swapped else (outputs, channels)
        depth = round_up(ceil_divide(positions, self.parts), ROUND)
        sizes, block = (self.parts * taps, m, depth, n), (self.rows, self.columns)
        added = 8 * self.parts * taps * m * n / MEMORY_RATE
        return STEP_SECONDS * estimate_waves(sizes, block, BUSY_PROGRAMS) + added


@cache
def choose_tap_products(taps: int, outputs: int, channels: int, positions: int, any_columns: bool) -> TapProducts:
    """The blocks and parts that take the least time.

    >>> choose_tap_products(9, 512, 512, 2048, True).parts  # the results fill the GPU
    1
    """
    most = max(1, min(MOST_PARTS, positions // (ROUND * LEAST_ROUNDS)))
    blocks = list(BLOCK_RATES) if any_columns else EVEN_BLOCKS
    ways = [TapProducts(*each, *way) for each in blocks for way in itertools.product((False, True), range(1, most + 1))]
    return min(ways, key=lambda way: way.estimate_seconds(taps, outputs, channels, positions))


@dataclass(frozen=True)
class WeightGradient:
    """The gradient [1, O, C · taps] of the weights of windows."""

    image: PlacedOperand
    gradient: PlacedOperand
    windows: StackedWindows
    batch: int
    narrow: DType
    result: tuple[int, ...]
    any_columns: bool = False  # whether blocks have numbers of columns that are no powers of two

    @property
    def operands(self) -> tuple[Value, Value]:
        """The image and the gradient."""
        return self.image.value, self.gradient.value

    @property
    def taps(self) -> tuple[int, ...]:
        """The taps along three axes."""
        return _along_axes(self.windows.taps)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the windows along three axes."""
        return _along_axes(self.windows.strides)

    def find_grid(self) -> tuple[int, ...]:
        """The planes, lines and places of an image with the zeros behind it, which take the least time."""
        image, counts = self.image, _along_axes(self.windows.counts)
        sides = [*zip(image.sizes, counts, image.low, image.high, self.strides, strict=True)]
        if max(self.strides) > 1:
            least = [ceil_divide(n + a + b, s) for n, _, a, b, s in sides]
        else:  # the zeros behind a line are before the next one, too
            least = [max(n + max(a, b), m) for n, m, a, b, _ in sides]
        if self.gradient.last:
            return tuple(least)
        more = itertools.product(range(ALIGNMENT), repeat=2)
        grids = [(least[0], least[1] + lines, least[2] + places) for lines, places in more]
        fits = [grid for grid in grids if self.batch * math.prod(grid) % ALIGNMENT == 0]
        return min(fits, key=self._estimate_grid)

    def _estimate_grid(self, grid: tuple[int, ...]) -> float:
        """The seconds of the copies into a grid, and of the products over its positions if they fill the GPU."""
        products = 2 * self.batch * math.prod(grid) * math.prod(self.taps) * self.gradient.channels
        return self._estimate_copies(grid) + products * self.image.channels / BF16_RATE

    def _estimate_copies(self, grid: tuple[int, ...]) -> float:
        """The seconds of the copies into a grid."""
        seconds = 2 * LAUNCH_SECONDS
        for each in (self.image, self.gradient):
            phases = math.prod(self.strides) if each is self.image else 1
            elements = self.batch * each.channels * (phases * math.prod(grid) + math.prod(each.sizes))
            unit = ALIGNMENT if each.last else math.gcd(grid[2], each.sizes[2], ALIGNMENT)
            rate = PLACE_RATES[unit] if each is self.gradient or each.last else TURN_RATE
            rate = PHASES_RATE if phases > 1 else rate
            seconds += 2 * elements / rate
        return seconds

    def choose_products(self, grid: tuple[int, ...]) -> TapProducts:
        """The blocks and parts that take the least time."""
        return choose_tap_products(*self._measure_products(grid), self.any_columns)

    def _measure_products(self, grid: tuple[int, ...]) -> tuple[int, int, int, int]:
        """The taps, outputs, channels and positions."""
        return math.prod(self.taps), self.gradient.channels, self.image.channels, self.batch * math.prod(grid)

    def estimate_seconds(self) -> float:
        """The seconds of all launches."""
        grid = self.find_grid()
        products = self.choose_products(grid).estimate_seconds(*self._measure_products(grid))
        return self._estimate_copies(grid) + products + 2 * LAUNCH_SECONDS

    def estimate_stacked(self) -> float:
        """The seconds of a product with windows in memory."""
        windows = self.batch * self.image.channels * math.prod(self.taps)
        places, outputs = math.prod(self.windows.counts), self.gradient.channels
        seconds = 2 * windows * places / WINDOWS_RATE + 8 * windows * outputs / MEMORY_RATE
        return seconds + 2 * windows * places * outputs / BF16_RATE + 3 * LAUNCH_SECONDS

    def compute(self, image: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the weights, for both operands' values."""
        grid = self.find_grid()
        way = self.choose_products(grid)
        narrow = [x if x.dtype == self.narrow else basic.cast(x, dtype=self.narrow) for x in (image, gradient)]
        image = self._place_image(narrow[0], grid)
        gradient = self.gradient.place(narrow[1], self.batch, grid, False)
        sides, turned = (gradient, image), (self.gradient.last, True)
        if way.swapped:
            sides, turned = sides[::-1], turned[::-1]
        shifts = self._describe_shifts(grid)
        constants = {"turned_a": turned[0], "turned_b": turned[1], "moves_a": way.swapped, "shifts": shifts}
        sums = self._multiply(*sides, grid, way, constants)
        return shape.reshape(self._check(join_sums(sums), *sides, grid, constants), shape=self.result)

    def _place_image(self, image: Tensor, grid: tuple[int, ...]) -> Tensor:
        """The image in a grid, as [positions, C'] of each phase."""
        if max(self.strides) == 1:
            return self.image.place(image, self.batch, grid, True)
        return self.image.place_phases(image, self.batch, grid, self.strides)

    def _describe_shifts(self, grid: tuple[int, ...]) -> dict[str, Any]:
        """The numbers of `find_shift`."""
        steps = grid[1] * grid[2], grid[2], 1
        # Phases have the zeros before a line in memory.
        lead = sum(a * b for a, b in zip(self.image.low, steps, strict=True)) if max(self.strides) == 1 else 0
        width, gaps = round_up(self.image.channels, ALIGNMENT), _along_axes(self.windows.dilations)
        return {"taps": self.taps, "gaps": gaps, "strides": self.strides, "steps": steps, "lead": lead, "width": width}

    def _multiply(
        self, a: Tensor, b: Tensor, grid: tuple[int, ...], way: TapProducts, constants: dict[str, Any]
    ) -> Tensor:
        """The sums [S, T, M, N] of the parts of the positions."""
        positions, taps = self.batch * math.prod(grid), math.prod(self.taps)
        depth = round_up(ceil_divide(positions, way.parts), ROUND)
        parts, sizes = ceil_divide(positions, depth), (self.gradient.channels, self.image.channels)
        rows, columns = sizes[::-1] if way.swapped else sizes
        memory = OutputMemory(TensorType((parts, taps, rows, columns), f32))
        programs = parts * taps, ceil_divide(rows, way.rows), ceil_divide(columns, way.columns)
        tiles = {"BM": way.rows, "BN": way.columns, "BK": ROUND}
        return launch(multiply_shifted, programs, a, b, memory, **constants, depth=depth, **tiles)

    def _check(self, sums: Tensor, a: Tensor, b: Tensor, grid: tuple[int, ...], constants: dict[str, Any]) -> Tensor:
        """The sum [O, C, T] of the parts, where it is finite."""
        _, taps, rows, columns = (int(n) for n in sums.shape)
        memory = OutputMemory(TensorType((self.gradient.channels, self.image.channels, taps), f32))
        windows = {"images": self.batch, "counts": _along_axes(self.windows.counts), "pitches": grid}
        across = ceil_divide(rows, CHECKED), ceil_divide(columns, CHECKED)
        together = min(CHECKED_TAPS, 1 << (taps - 1).bit_length())
        while together > 2 and math.prod(across) * ceil_divide(taps, together) < BUSY_PROGRAMS:
            together //= 2
        tiles = {"B": CHECKED, "BT": together, "BK": CHECKED_POSITIONS}
        programs = *across, ceil_divide(taps, together)
        return launch(check_shifted, programs, sums, a, b, memory, **constants, **windows, **tiles)


def _along_axes(numbers: tuple[int, ...], missing: int = 1) -> tuple[int, ...]:
    """Numbers along the spatial axes of an image as those along three."""
    return (missing,) * (AXES - len(numbers)) + tuple(int(n) for n in numbers)


def match_weight_gradient(uses: UseDef, node: Node, plan: LoweringPlan) -> WeightGradient | None:
    """A sum over images of products with transposed windows of 16-bit floats, or that of one image; None where it is
    none or does not pay."""
    found = match_window_gradient(uses, node)
    if found is None:
        return None
    product = found.convolution.product
    (batch, groups, outputs, _), windows = product.result, product.windows
    kinds = {find_narrow_type(uses, v) for v in (windows.image, found.gradient)}
    narrow = kinds.pop()
    if kinds or narrow is None or groups != 1 or (batch > 1 and not found.whole):
        return None
    image = _find_placed(uses, windows.image, get_shape(windows.image))
    gradient = _find_placed(uses, found.gradient, (batch, outputs, *windows.counts))
    if any(gradient.low) or any(gradient.high):
        return None
    result = tuple(int(n) for n in get_shape(node.out))
    made = WeightGradient(image, gradient, windows, batch, narrow, result, plan.wave_blocks)
    return made if made.estimate_seconds() < made.estimate_stacked() else None


def _find_placed(uses: UseDef, value: Value, sizes: tuple[Any, ...]) -> PlacedOperand:
    """A value of these sizes [B, C, …] as an operand: what it is before casts, padding and a move of its channels."""
    view = uses.find(value, shape.reshape)
    if view is not None and tuple(get_shape(view.args[0])) == tuple(sizes):
        value = view.args[0]
    low = high = (0,) * (len(sizes) - 2)
    rank = len(sizes)
    last = (0, rank - 1, *range(1, rank - 1))
    while (node := uses.get(value)) is not None:
        if node.op is basic.cast and get_tensor_type(value).dtype == f32 and find_narrow_type(uses, value) is not None:
            value = node.args[0]
            continue
        if not _pads_with_zeros(node) or any(low) or any(high):
            break
        low, high = tuple(node.attrs["low"][2:]), tuple(node.attrs["high"][2:])
        value = node.args[0]
    spatial = tuple(int(n) - a - b for n, a, b in zip(sizes[2:], low, high, strict=True))
    sides = _along_axes(low, 0), _along_axes(high, 0)
    placed = PlacedOperand(value, False, int(sizes[1]), _along_axes(spatial), *sides)
    turned = uses.find(value, shape.permute)
    if turned is None or tuple(turned.attrs["axes"]) != last:
        return placed
    whole = placed.channels % ALIGNMENT == 0 or rank - 2 < AXES  # one copy adds zeros along four axes
    return replace(placed, value=turned.args[0], last=True) if whole else placed


def _pads_with_zeros(node: Node) -> bool:
    """Whether a node pads the spatial axes of an image alone, with zeros."""
    if node.op is not shape.pad or node.attrs["value"] != 0:
        return False
    sides = node.attrs["low"], node.attrs["high"]
    return all(n >= 0 for side in sides for n in side) and not any(n for side in sides for n in side[:2])
