"""Fourier transforms: the library `<kernels/fft/fft3d_layout>`, a 3D transform on a square of PEs.

The vendor's source is closed; its documentation and its example `fft-3d` define what the library exports. Each PE holds
T x T pencils of N complex numbers: element z of pencil (y, x) at z * T * T + (y % T) * T + x % T, real part first. A
transform of the pencils is radix 2, decimation in time, with the host's twiddle factors and a rounding after each
operation. Between the transforms a row or a column of PEs transposes its block, all to all: a message arrives whole,
one cycle later per hop, and no wavelet appears. Two more transposes restore the order of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tessera.core.errors import UNKNOWN
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.pe.pe_state import WaitCondition
from tessera.interp.target.csl.pe.scheduler import activate, notify, spawn
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.values import ComptimeValue, NativeFunction, Pointer
from tessera.interp.target.csl.text.diagnostics import CslError, CslFault

PE_LIBRARY = "<kernels/fft/pe>"  # of this simulator alone
PE_FILE = Path(__file__).parent.parent / "library" / "fft3d_pe.csl"
FUNCTIONS = {"csfftExecC2C": 2, "csfftExecR2C": 1, "csfftExecC2R": 1}  # exported, with the number of i16 parameters
# The axes along which the host's norms scale: forward, inverse. The scale of one axis is N ** -power.
NORM_POWERS = {0: (0.0, 1.0), 1: (0.5, 0.5), 2: (1.0, 0.0)}  # backward, ortho, forward
_KEY = "fft"
Steps = Generator[Any, None, None]
SQUARE = ("size", "width", "column", "row")  # parameters of the program of a PE


class Square(NamedTuple):
    """The size of a transform, and the square of PEs that computes it."""

    size: int
    width: int
    column: int
    row: int


# The layout.


def make_fft_layout(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
    """`FFT_kernel(width, N, type)`, or `FFT_kernel(x, y, width, N, type)` for a square that begins at (x, y)."""
    if not unit.is_layout:
        raise CslError("<kernels/fft/fft3d_layout> is imported in the layout")
    lacking = [name for name in ("width", "memcpy") if name not in params]
    if lacking:
        raise CslError(f"<kernels/fft/fft3d_layout> needs the parameter '{lacking[0]}'", expected="width, memcpy")
    run = NativeFunction("FFT_kernel", partial(place_kernel, params), comptime=True, shorter=(3,))
    return {"FFT_kernel": ComptimeValue(t.CslFunctionType("", (None,) * 5, t.VOID), run)}


def place_kernel(params: dict[str, ComptimeValue], unit: Any, *args: ComptimeValue) -> None:
    """Set the code of a square of PEs, and declare the names that it exports.

    Raises:
        CslError: the sizes do not fit one another or the rectangle, or the elements are no floats.
    """
    *place, width, size = (int(value.data) for value in args[:-1])
    x, y = place or (0, 0)
    element = args[-1].data
    _check_sizes(unit, int(params["width"].data), x, y, width, size, element)
    for column in range(x, x + width):
        for row in range(y, y + width):
            code = {
                "memcpy_params": _call_get_params(unit, params["memcpy"], column),
                "element": args[-1],
                **{n: ComptimeValue(t.U16, v) for n, v in zip(SQUARE, (size, width, x, y), strict=True)},
            }
            unit.layout.set_tile_code((column, row), PE_FILE, code, UNKNOWN)
    for name, kind in (("X", element), ("twiddle_array", element), ("fft_time", t.U16)):
        unit.layout.export_name(name, t.CslPointer("", kind, many=True), True, UNKNOWN)
    for name, count in FUNCTIONS.items():
        unit.layout.export_name(name, t.CslFunctionType("", (t.I16,) * count, t.VOID), None, UNKNOWN)


def _call_get_params(unit: Any, memcpy: ComptimeValue, column: int) -> ComptimeValue:
    """The parameters of `<memcpy/memcpy>` for a column."""
    get_params = memcpy.data.members["get_params"].data
    return get_params.run(unit, ComptimeValue(t.COMPTIME_INT, column))


def _check_sizes(unit: Any, declared: int, x: int, y: int, width: int, size: int, element: Any) -> None:
    columns, rows = unit.rectangle
    if size < 2 or size & (size - 1):
        raise CslError("FFT_kernel: the size of a transform is a power of two", received=str(size))
    if width < 1 or width != declared or size % width:
        expected = f"the width of the import, {declared}, which divides the size {size}"
        raise CslError("FFT_kernel: wrong width", expected=expected, received=str(width))
    if min(x, y) < 0 or x + width > columns or y + width > rows:
        where = f"{width} x {width} PEs at ({x}, {y})"
        raise CslError(f"FFT_kernel: {where} do not fit into the rectangle of {columns} x {rows} PEs")
    if element not in (t.F32, t.NAMED[unit.options.fp16_format]):
        raise CslError("FFT_kernel: elements are f16 or f32", received=str(element))


def make_unpublished(name: str) -> Callable[..., dict[str, ComptimeValue]]:
    """A module of the library whose parameters are not public."""

    def make(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
        raise CslError(
            f"<kernels/fft/{name}> is not supported: the vendor does not publish its parameters and functions",
            suggestion="import <kernels/fft/fft3d_layout> in the layout",
        )

    return make


# The program of a PE.


def make_fft_pe(unit: Any, params: dict[str, ComptimeValue]) -> dict[str, ComptimeValue]:
    """`transform(x, workspace, twiddles, time, norm, inverse, callback)`."""
    square = Square(*(int(params[name].data) for name in SQUARE))
    run = NativeFunction("transform", partial(start_transform, square), cycles=20, live=True)
    kinds = (None, None, None, None, t.I16, t.I16, t.LOCAL_TASK)
    return {"transform": ComptimeValue(t.CslFunctionType("", kinds, t.VOID), run)}


def start_transform(square: Square, pe: Any, x: Pointer, workspace: Pointer, twiddles: Pointer, time: Pointer,
                    norm: int, inverse: int, callback: int) -> None:  # fmt: skip
    """Transform the pencils of the square in place, then store the cycles and activate a task.

    Raises:
        CslFault: the norm or the direction does not exist.
    """
    if int(norm) not in NORM_POWERS or int(inverse) not in (0, 1):
        raise CslFault("csfftExec: unknown norm or direction", expected="norm 0, 1 or 2, inverse 0 or 1",
                       received=f"{int(norm)}, {int(inverse)}")  # fmt: skip
    begun = pe.clock

    def finish() -> None:
        taken = max(pe.clock, pe.events.now) - begun
        time.array.reshape(-1)[:3] = [taken >> 16 * i & 0xFFFF for i in range(3)]
        activate(pe, int(callback))

    side = square.size // square.width
    block, factors = x.array.reshape(square.size, side, side, 2), twiddles.array.reshape(-1, 2)
    scale = float(square.size) ** (-3 * NORM_POWERS[int(norm)][int(inverse)])
    spawn(pe, _transform(square, pe, block, factors, bool(inverse), scale), finish, "csfftExec")


def _transform(square: Square, pe: Any, block: np.ndarray, factors: np.ndarray, inverse: bool, scale: float) -> Steps:
    pencils, stages = block.shape[1] * block.shape[2], square.size.bit_length() - 1
    for vertical in (None, False, True):  # pencils along z, then x, then y
        if vertical is not None:
            yield from _transpose(square, pe, block, vertical)
        yield pe.events.now + COSTS.fft_butterfly * pencils * (square.size // 2) * stages
        with np.errstate(all="ignore"):
            block[:] = transform_pencils(block, factors, inverse)
    for vertical in (True, False):
        yield from _transpose(square, pe, block, vertical)
    with np.errstate(all="ignore"):
        block[:] = block * block.dtype.type(scale)


@lru_cache
def list_reversed_bits(size: int) -> np.ndarray:
    """The numbers below a power of two with their bits in reverse order.

    >>> list_reversed_bits(8).tolist()
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    order = np.zeros(1, np.int64)
    while order.size < size:
        order = np.concatenate([2 * order, 2 * order + 1])
    return order


def transform_pencils(block: np.ndarray, factors: np.ndarray, inverse: bool) -> np.ndarray:
    """The transforms along the first axis of pairs (real, imaginary), unscaled, rounded after each operation.

    `factors` are exp(pi i k / (N / 2)) for k below N / 2.
    """
    size = len(block)
    found = block[list_reversed_bits(size)]
    half = 1
    while half < size:
        pairs = found.reshape(size // (2 * half), 2, half, *block.shape[1:])
        w = factors[:: size // (2 * half)][:half].reshape(half, *(1,) * (block.ndim - 2), 2)
        real, imaginary = w[..., 0], w[..., 1] if inverse else -w[..., 1]
        low, (a, b) = pairs[:, 0], (pairs[:, 1, ..., 0], pairs[:, 1, ..., 1])
        high = np.stack([a * real - b * imaginary, a * imaginary + b * real], axis=-1)
        found = np.stack([low + high, low - high], axis=1).reshape(block.shape)
        half *= 2
    return found


def _transpose(square: Square, pe: Any, block: np.ndarray, vertical: bool) -> Steps:
    """Exchange the first axis with that of the columns of pencils along a row of PEs, or with the rows along a column.

    All PEs pass the same steps: the number of a step names the messages that belong together.
    """
    state = pe.state.setdefault(_KEY, {"step": 0, "arrived": {}})
    step, state["step"] = state["step"], state["step"] + 1
    side, cycles = len(block) // square.width, COSTS.fft_transpose * (block.size // 2)
    me = pe.y - square.row if vertical else pe.x - square.column
    yield pe.events.now + cycles // 2  # gather
    for other in range(square.width):
        place = (pe.x, square.row + other) if vertical else (square.column + other, pe.y)
        words = block[other * side : (other + 1) * side].copy()
        target = pe.fabric.node.fabric.nodes[place].pe
        pe.events.at(pe.events.now + abs(other - me), partial(_deliver, target, step, me, words))
    while len(state["arrived"].get(step, ())) < square.width:
        yield WaitCondition("state", _KEY)
    for source, words in state["arrived"].pop(step).items():
        turned = words.swapaxes(0, 1) if vertical else words.swapaxes(0, 2)
        block[source * side : (source + 1) * side] = turned
    yield pe.events.now + cycles - cycles // 2  # scatter


def _deliver(target: Any, step: int, source: int, words: np.ndarray) -> None:
    state = target.state.setdefault(_KEY, {"step": 0, "arrived": {}})
    state["arrived"].setdefault(step, {})[source] = words
    notify(target, "state", _KEY)
