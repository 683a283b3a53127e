"""Signals: discrete Fourier transforms as products with tables of cosines and sines, windows, mel weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tessera.core.types import f64
from tessera.ir.tensor import Tensor
from tessera.onnx.element_types import find_element
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.matrices import moveaxis
from tessera.ops.tensor.shape import gather, reshape, stack


def _transform(parts: Tensor, axis: int, length: Any, inverse: bool, count: Any, real: bool) -> Tensor:
    """The Fourier transform of `parts` [..., 2] (or [..., 1]: real) along an axis: `count` frequencies [..., 2].

    The result of a real inverse is [..., 1], from half of the frequencies of a Hermitian signal.
    """
    wide = cast(parts, dtype=f64)  # the angles need more digits than f32 has for a long signal
    rows = moveaxis(wide, axis, -2)
    rows = _fit(rows, length // 2 + 1 if real and inverse else length)
    given: Any = rows.shape[-2]
    angle = 2 * math.pi * (np.outer(np.arange(given), np.arange(count)) % length) / length
    cosine, sine = np.cos(angle), np.sin(angle) * (1 if inverse else -1)
    if real and inverse:
        weight = np.full((given, 1), 2.0)
        weight[0] = 1.0
        weight[-1] = 1.0 if length % 2 == 0 else 2.0
        cosine, sine = cosine * weight, sine * weight
    scale = 1 / length if inverse else 1.0
    real_part, imaginary = Tensor(cosine * scale), Tensor(sine * scale)
    a = rows[..., 0]
    b = rows[..., 1] if rows.shape[-1] == 2 else None
    first = matmul(a, real_part) if b is None else matmul(a, real_part) - matmul(b, imaginary)
    second = matmul(a, imaginary) if b is None else matmul(a, imaginary) + matmul(b, real_part)
    out = stack([first] if real and inverse else [first, second], axis=-1)
    return cast(moveaxis(out, -2, axis), dtype=parts.dtype)


def _fit(rows: Tensor, length: int) -> Tensor:
    """The last axis but one cut, or filled with zeros, to a length."""
    size = rows.shape[-2]
    if size >= length:
        return rows[..., :length, :]
    from tessera.ops.tensor.rearrange import pad

    return pad(rows, (*((0, 0),) * (rows.ndim - 2), (0, length - size), (0, 0)))


@rule("DFT", static=(1, 2))
def _(call: NodeCall, x: Tensor, length: Tensor | None = None, axis: Tensor | None = None) -> Tensor:
    along = call.attr("axis", -2) if axis is None else call.ints(axis, "the axis")[0]
    at = along % x.ndim
    inverse, onesided = bool(call.attr("inverse")), bool(call.attr("onesided"))
    given = x.shape[at]
    whole = 2 * (given - 1) if inverse and onesided else given
    size = whole if length is None else call.ints(length, "the length")[0]
    count = size if inverse or not onesided else size // 2 + 1
    return _transform(x, at, size, inverse, count, onesided)


@rule("STFT", static=(1, 3))
def _(
    call: NodeCall, signal: Tensor, step: Tensor, window: Tensor | None = None, length: Tensor | None = None
) -> Tensor:
    by = call.ints(step, "the step")[0]
    size: Any = call.ints(length, "the length")[0] if length is not None else window.shape[0]  # type: ignore[union-attr]
    rows = signal if signal.ndim == 3 else reshape(signal, shape=(*signal.shape, 1))
    frames: Any = (rows.shape[1] - size) // by + 1
    places = np.arange(frames)[:, None] * by + np.arange(size)
    cut: Any = gather(rows, Tensor(places), axis=1)
    if window is not None:
        cut = cut * reshape(window, shape=(1, 1, -1, 1))
    onesided = bool(call.attr("onesided"))
    return _transform(cut, 2, size, False, size // 2 + 1 if onesided else size, False)


WINDOWS = {
    "HannWindow": (0.5, 0.5, 0.0),
    "HammingWindow": (25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": (0.42, 0.5, 0.08),
}


@rule(*WINDOWS, static=(0,))
def _(call: NodeCall, size: Tensor) -> Tensor:
    count = call.ints(size, "the size")[0]
    a, b, c = WINDOWS[call.operator]
    angle = 2 * np.pi * np.arange(count) / (count if call.attr("periodic") else max(count - 1, 1))
    values = a - b * np.cos(angle) + c * np.cos(2 * angle)
    return cast(Tensor(values), dtype=find_element(call.attr("output_datatype"), call.operator))


@rule("MelWeightMatrix", static=(0, 1, 2, 3, 4))
def _(call: NodeCall, *operands: Tensor) -> Tensor:
    bins, length, rate, low, high = (call.array(x, "the filters").reshape(())[()].item() for x in operands)
    spectrum = length // 2 + 1
    edges = _to_mel(low) + np.arange(bins + 2) * ((_to_mel(high) - _to_mel(low)) / (bins + 2))
    places = np.floor((length + 1) * (700 * np.expm1(edges / 2595 * math.log(10))) / rate).astype(np.int64)
    found = np.zeros((spectrum, bins))
    for i in range(bins):
        left, middle, right = places[i : i + 3]
        if middle == left:
            found[middle, i] = 1.0
        else:
            found[left : middle + 1, i] = (np.arange(left, middle + 1) - left) / (middle - left)
        if right > middle:
            found[middle:right, i] = (right - np.arange(middle, right)) / (right - middle)
    return cast(Tensor(found), dtype=find_element(call.attr("output_datatype"), "MelWeightMatrix"))


def _to_mel(frequency: float) -> float:
    return 2595 * math.log10(1 + frequency / 700)
