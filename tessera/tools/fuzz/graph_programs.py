"""Random Graph programs: DAGs of ops over inputs of several element types, sizes and policies.

Each statement is an expression over the values before it. It is executed at once on sample data, which gives the shape
and type of its value; a statement that the op refuses is left out and counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.inputs import KINDS
from tessera.core.errors import TesseraError
from tessera.core.types import as_dtype
from tessera.ir.tensor import Tensor
from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.programs import TESSERA, Input, RandomProgram

SIZES = (1, 2, 3, 4, 5, 7, 8, 0, 16, 17, 33, 64, 65, 130)
FLOATS = ("f32", "f64", "f16", "bf16", "fp8_e4m3", "fp8_e5m2")
INTEGERS = ("int32", "int64", "int8", "uint8", "int16", "uint32")
DTYPES = ("f32", "f32", "f32", "f64", "f16", "bf16", "int32", "int64", "int8", "uint8", "bool", "fp8_e4m3", "fp8_e5m2")
LIMIT = 20_000  # elements of a value
STEPS = 6

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
    "ts.f32 @ ts.flush_denormals", "ts.bf16 @ ts.toward_zero",
)  # fmt: skip


class ValuePool:
    """The values of a program in construction: their names, and samples with shape and type."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.samples: dict[str, Any] = {}
        self.used: set[str] = set()

    def find(self, fits: Callable[[Any], bool] = lambda sample: True) -> str | None:
        """The name of a value that fits, the last one first; None without one."""
        names = [n for n, sample in reversed(self.samples.items()) if fits(sample)]
        return self.choices.pick(names) if names else None

    def find_like(self, name: str) -> str:
        """An operand for an op with a value: another of its type and a shape that broadcasts, or a number."""
        sample = self.samples[name]

        def fits(other: Any) -> bool:
            try:
                shape = np.broadcast_shapes(other.shape, sample.shape)
            except ValueError:
                return False
            same = other.dtype is sample.dtype and other.type.policy == sample.type.policy
            return bool(same and np.prod(shape) <= LIMIT)

        found = [n for n, other in self.samples.items() if fits(other)]
        number = ("1", "2", "-1", "0", "3") if not is_float(sample) else ("0.5", "1.0", "-2.0", "0.0", "3.0", "1e-3")
        names = [*reversed(found), *number] if sample.dtype.kind != "bool" else found
        return self.choices.pick(names)


def is_float(sample: Any) -> bool:
    """Whether a value has floats."""
    return bool(sample.dtype.is_float)


def is_integer(sample: Any) -> bool:
    """Whether a value has integers."""
    return bool(sample.dtype.is_integer)


def is_number(sample: Any) -> bool:
    """Whether a value has no bools."""
    return sample.dtype.kind != "bool"


def is_bool(sample: Any) -> bool:
    """Whether a value has bools."""
    return not is_number(sample)


def has_axes(sample: Any) -> bool:
    """Whether a value is not a scalar."""
    return bool(sample.ndim > 0)


Rule = Callable[[Choices, ValuePool, str], str | None]
RULES: list[Callable[[Choices, ValuePool], str | None]] = []


def rule(fits: Callable[[Any], bool], weight: int = 1) -> Callable[[Rule], Rule]:
    """Register a kind of statement on a value that fits, drawn in proportion to its weight."""

    def add(function: Rule) -> Rule:
        def apply(c: Choices, pool: ValuePool) -> str | None:
            name = pool.find(fits)
            return None if name is None else function(c, pool, name)

        RULES.extend([apply] * weight)
        return function

    return add


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


@rule(has_axes)
def _index(c: Choices, pool: ValuePool, name: str) -> str | None:
    sample = pool.samples[name]
    axis = c.draw(sample.ndim)
    size = sample.shape[axis]
    if not size:
        return None
    places = [c.draw(size) for _ in range(1 + c.draw(4))]
    kind = c.draw(4)
    if kind == 0:
        return f"ts.take({name}, ts.Tensor({places}), axis={axis})"
    rows = f"ts.Tensor({sorted(set(p % max(sample.shape[0], 1) for p in places))})"
    if kind == 1:
        return f"ts.scatter({name}, {rows}, ts.take({name}, {rows}, axis=0) * 2, axis=0)" if is_number(sample) else None
    if kind == 2:
        again = f"ts.Tensor({[p % max(sample.shape[0], 1) for p in places]})"
        return (
            f"ts.scatter_add({name}, {again}, ts.take({name}, {again}, axis=0), axis=0)" if is_number(sample) else None
        )
    return f"ts.take_along_axis({name}, ts.argsort({name}, axis={axis}), axis={axis})"


BODIES = ("s + y", "s * 0.5 + y", "ts.maximum(s, y)", "ts.where(y > s, s, y - s)", "ts.tanh(s) * y", "s - y * 2")


@rule(lambda s: s.ndim > 0 and is_number(s) and 0 < s.shape[0] <= 17, 2)
def _flow(c: Choices, pool: ValuePool, name: str) -> str:
    body, other = c.pick(BODIES), c.pick(BODIES)
    if not is_float(pool.samples[name]):
        body, other = (b.replace("s * 0.5", "s * 3").replace("ts.tanh(s)", "s") for b in (body, other))
    count = c.draw(4)
    return c.pick((
        f"ts.scan(lambda s, y: ({body}, {other}), {name}[0], {name})[1]",
        f"ts.scan(lambda s, y: ({body}, s), {name}[0], {name}, reverse=True)[0]",
        f"ts.fori_loop(0, {count}, lambda i, s: {body.replace('y', name)}, {name})",
        f"ts.while_loop(lambda i, s: i < {count}, lambda i, s: (i + 1, {body.replace('y', name)}), (0, {name}))[1]",
        f"ts.cond(ts.sum(ts.cast({name} > 0, dtype=ts.int32)) > {count}, "
        f"lambda s, y: {body}, lambda s, y: {other}, {name}, {name})",
        f"ts.vmap(lambda y: {body.replace('s', 'y', 1) if body[0] == 's' else 'y * 2'})({name})",
        f"ts.map(lambda y: y * 2{' - y[:1]' if pool.samples[name].ndim > 1 else ''}, {name})",
        f"ts.checkpoint(lambda s, y: {body})({name}, {name})",
    ))  # fmt: skip


@rule(lambda s: is_float(s) and s.dtype.bits >= 32 and s.type.policy is None)
def _derivative(c: Choices, pool: ValuePool, name: str) -> str:
    op = c.pick(
        ("tanh", "sin", "square", "exp", "softplus", "gelu", "sigmoid", "relu", "abs", "sinh", "cumsum", "softmax")
    )
    total = c.pick(("ts.sum(ts.square(ts.{}(z)))", "ts.sum(ts.{}(z) * z)", "ts.mean(ts.{}(z))", "ts.max(ts.{}(z))"))
    return f"ts.grad(lambda z: {total.format(op)})({name})"


def make_program(choices: Choices, refused: Counter[str] | None = None) -> RandomProgram:
    """A random program; `refused` counts the statements that were left out, by op and error."""
    inputs = tuple(_make_input(choices, i) for i in choices.repeat(3, one_in=2))
    pool = ValuePool(choices)
    with np.errstate(all="ignore"):
        pool.samples.update({i.name: Tensor(i.make(), as_dtype(i.dtype)) for i in inputs})
        lines = _make_statements(choices, pool, refused)
    leaves = [n for n in pool.samples if n not in pool.used and n.startswith("v")] or [list(pool.samples)[-1]]
    text = "".join(f"    {line}\n" for line in lines)
    returned = ", ".join(leaves[-4:])
    return RandomProgram(f"def program({', '.join(i.name for i in inputs)}):\n{text}    return {returned}\n", inputs)


def _make_input(choices: Choices, number: int) -> Input:
    with choices.span():
        rank = (2, 1, 3, 0, 2, 2)[choices.draw(6)]
        shape = tuple(choices.pick(SIZES) for _ in range(rank))
        while np.prod(shape) > 4500:
            shape = tuple(s // 2 for s in shape)
        return Input(f"x{number}", shape, choices.pick(DTYPES), choices.pick(KINDS), choices.draw(8))


def _make_statements(choices: Choices, pool: ValuePool, refused: Counter[str] | None) -> Sequence[str]:
    lines: list[str] = []
    for _ in choices.repeat(STEPS):
        before = set(pool.samples)
        text = choices.pick(RULES)(choices, pool)
        if not text:
            continue
        try:
            sample = eval(text, {"ts": TESSERA, **pool.samples})
        except TesseraError as error:
            if refused is not None:
                refused[f"{text.split('(')[0]}: {type(error).__name__}"] += 1
            continue
        if not isinstance(sample, Tensor) or sample.numpy().size > LIMIT:
            continue
        if _is_lost(sample) and not choices.chance(4):
            continue
        name = f"v{len(lines)}"
        lines.append(f"{name} = {text}")
        pool.samples[name] = sample
        pool.used |= {n for n in before if _mentions(text, n)}
    return lines


def _mentions(text: str, name: str) -> bool:
    """Whether a name is in an expression, and is no attribute."""
    return re.search(rf"(?<![\w.]){name}(?!\w)", text) is not None


def _is_lost(sample: Any) -> bool:
    """Whether most of a value is NaN or infinite, so that later results say little."""
    if not is_float(sample) or not sample.size:
        return False
    return bool(np.isfinite(sample.numpy().astype(np.float64)).mean() < 0.5)
