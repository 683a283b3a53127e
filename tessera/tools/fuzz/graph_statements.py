"""Statements of random Graph programs: pointwise ops, casts and policies, reductions, moves and products."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.value_pool import ValuePool, has_axes, is_bool, is_float, is_integer, is_number, rule

FLOATS = ("f32", "f64", "f16", "bf16", "fp8_e4m3", "fp8_e5m2")
INTEGERS = ("int32", "int64", "int8", "uint8", "int16", "uint32")

FLOAT_UNARY = (
    "neg abs exp log sqrt rsqrt tanh sin cos floor ceil round trunc sign square reciprocal exp2 log2 expm1 log1p erf "
    "sigmoid relu silu gelu softplus elu leaky_relu atan asin acos sinh cosh asinh acosh atanh tan log10 mish selu "
    "hardswish logsigmoid softsign isnan isinf isfinite signbit nan_to_num"
).split()
INTEGER_UNARY = "neg abs sign square bitwise_not".split()
FLOAT_BINARY = "add sub mul div maximum minimum pow floor_divide remainder fmod atan2 copysign hypot logaddexp".split()
COMPARISONS = "less less_equal greater greater_equal equal not_equal".split()
INTEGER_BINARY = "add sub mul maximum minimum bitwise_and bitwise_or bitwise_xor".split()
REDUCTIONS = "sum max min mean prod var argmax argmin std logsumexp any all".split()
POLICIES = (
    "ts.bf16 @ ts.accum(ts.f32)", "ts.f32 @ ts.toward_zero", "ts.fp8_e5m2 @ ts.saturate", "ts.f16 @ ts.compute(ts.f16)",
    "ts.f32 @ ts.flush_denormals", "ts.bf16 @ ts.toward_zero", "ts.f32 @ ts.compute(ts.tf32)", "ts.f32 @ ts.saturate",
    "ts.f32 @ ts.compute(ts.f16)", "ts.f32 @ ts.compute(ts.tf32) @ ts.saturate", "ts.f16 @ ts.saturate",
)  # fmt: skip


@rule(is_number, 4)
def _unary(c: Choices, pool: ValuePool, name: str) -> str:
    return f"ts.{c.pick(FLOAT_UNARY if is_float(pool.samples[name]) else INTEGER_UNARY)}({name})"


@rule(is_number, 5)
def _binary(c: Choices, pool: ValuePool, name: str) -> str:
    table = FLOAT_BINARY if is_float(pool.samples[name]) else INTEGER_BINARY
    first, second = name, pool.find_like(name)
    if c.chance(3):
        first, second = second, first
    return f"ts.{c.pick(table)}({first}, {second})"


@rule(is_number)
def _compare(c: Choices, pool: ValuePool, name: str) -> str:
    return f"ts.{c.pick(COMPARISONS)}({name}, {pool.find_like(name)})"


@rule(is_integer)
def _divide_integers(c: Choices, pool: ValuePool, name: str) -> str:
    divisor = c.pick(("2", "3", "7", "-2", "-5") if pool.samples[name].dtype.name[0] != "u" else ("2", "3"))
    return f"{c.pick(('ts.floor_divide', 'ts.remainder', 'ts.fmod'))}({name}, {divisor})"


@rule(is_integer)
def _shift(c: Choices, pool: ValuePool, name: str) -> str:
    return f"ts.{c.pick(('shift_left', 'shift_right'))}({name}, {c.draw(7)})"


@rule(is_number, 2)
def _where(c: Choices, pool: ValuePool, name: str) -> str:
    shape = pool.samples[name].shape
    condition = pool.find(lambda s: s.dtype.kind == "bool" and s.shape == shape) or f"{name} > 0"
    return f"ts.where({condition}, {name}, {pool.find_like(name)})"


@rule(is_bool)
def _logic(c: Choices, pool: ValuePool, name: str) -> str:
    if c.chance(2):
        return f"ts.logical_not({name})"
    return f"ts.{c.pick(('bitwise_and', 'bitwise_or', 'bitwise_xor'))}({name}, {pool.find_like(name)})"


@rule(lambda _: True, 2)
def _cast(c: Choices, pool: ValuePool, name: str) -> str:
    return f"ts.cast({name}, dtype=ts.{c.pick((*FLOATS, *INTEGERS, 'bool'))})"


@rule(is_float)
def _policy(c: Choices, pool: ValuePool, name: str) -> str:
    return f"ts.cast({name}, dtype={c.pick(POLICIES)})"


@rule(has_axes, 3)
def _reduce(c: Choices, pool: ValuePool, name: str) -> str:
    sample = pool.samples[name]
    op = c.pick(REDUCTIONS if is_float(sample) else ("sum", "max", "min", "argmax", "any"))
    axes: list[Any] = [-1, *range(sample.ndim)]
    if op not in ("argmax", "argmin"):
        axes += [None, *([(0, sample.ndim - 1), (1, 0)] if sample.ndim > 1 else [])]
    return f"ts.{op}({name}, axis={c.pick(axes)}, keepdims={c.pick((True, False))})"


@rule(lambda s: s.ndim > 0 and is_number(s))
def _scan_axis(c: Choices, pool: ValuePool, name: str) -> str:
    axis = c.draw(pool.samples[name].ndim)
    return f"ts.{c.pick(('cumsum', 'cumprod', 'sort', 'argsort', 'flip', 'diff'))}({name}, axis={axis})"


@rule(lambda s: s.ndim > 0 and is_float(s))
def _normalise(c: Choices, pool: ValuePool, name: str) -> str:
    axis = c.draw(pool.samples[name].ndim)
    return c.pick((
        f"ts.softmax({name}, axis={axis})", f"ts.log_softmax({name}, axis={axis})", f"ts.layer_norm({name})",
        f"ts.rms_norm({name})",
    ))  # fmt: skip


@rule(has_axes, 2)
def _slice(c: Choices, pool: ValuePool, name: str) -> str:
    shape = pool.samples[name].shape
    parts = []
    for size in shape:
        low, step = c.draw(min(size, 5) + 1), c.pick((1, 1, 2, -1, 3))
        high = c.draw(min(size, 6) + 1)
        parts.append(c.pick((":", f"{low}:", f":{max(size - high, 0)}", f"{low}:{size - high}:{abs(step)}", "::-1")))
    if c.chance(4):
        parts[0] = str(c.draw(shape[0])) if shape[0] else ":"
    return f"{name}[{', '.join(parts)}]"


@rule(has_axes, 2)
def _move(c: Choices, pool: ValuePool, name: str) -> str:
    sample = pool.samples[name]
    axis, size = c.draw(sample.ndim), int(np.prod(sample.shape))
    axes = list(range(sample.ndim))
    axes = axes[axis + 1 :] + axes[: axis + 1]
    shapes = [(-1,), (size, 1), (1, size), tuple(reversed(sample.shape))] + [
        (size // k, k) for k in (2, 3, 4) if size and not size % k
    ]
    return c.pick((
        f"ts.permute({name}, {tuple(axes)})", f"ts.reshape({name}, {c.pick(shapes)})",
        f"ts.expand_dims({name}, {axis})",
        f"ts.roll({name}, {c.draw(5) - 2}, axis={axis})", f"ts.repeat({name}, {1 + c.draw(2)}, axis={axis})",
        f"ts.tril({name})", f"ts.squeeze({name})", f"ts.broadcast_to({name}, {(2, *sample.shape)})",
    ))  # fmt: skip


@rule(has_axes, 2)
def _join(c: Choices, pool: ValuePool, name: str) -> str:
    sample = pool.samples[name]
    axis = c.draw(sample.ndim)
    rest = sample.shape[:axis] + sample.shape[axis + 1 :]

    def fits(s: Any) -> bool:
        return s.ndim == sample.ndim and s.dtype is sample.dtype and s.shape[:axis] + s.shape[axis + 1 :] == rest

    other = pool.find(fits)
    width = [(c.draw(3), c.draw(3)) for _ in range(sample.ndim)]
    value = "" if sample.dtype.kind == "bool" else f", value={c.pick((0, 1, -1, 2))}"
    return c.pick((
        f"ts.concatenate([{name}, {other}], axis={axis})", f"ts.stack([{name}, {name}], axis={axis})",
        f"ts.pad({name}, {tuple(width)}{value})",
    ))  # fmt: skip


@rule(lambda s: s.ndim >= 2 and is_number(s) and s.shape[-1] <= 160 and s.shape[-2] <= 160, 2)
def _product(c: Choices, pool: ValuePool, name: str) -> str:
    sample = pool.samples[name]
    k = sample.shape[-1]

    def fits(s: Any) -> bool:
        return s.ndim == 2 and s.shape[0] == k and s.dtype is sample.dtype and s.type.policy == sample.type.policy

    other = pool.find(fits)
    order = (*range(sample.ndim - 2), sample.ndim - 1, sample.ndim - 2)
    own = f"ts.permute({name}, {order})"
    return f"ts.matmul({name}, {other})" if other and c.chance(2) else f"ts.matmul({name}, {own})"
