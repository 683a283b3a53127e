"""Statements of random Graph programs with layers: contractions, convolutions, windows, norms, losses and attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.value_pool import ValuePool, has_axes, is_float, is_number, rule


def _is_small(sample: Any) -> bool:
    return bool(is_float(sample) and 0 < sample.size <= 600)


def _draw_weights(c: Choices, pool: ValuePool, name: str, shape: tuple[int, ...]) -> str:
    """Weights for a value: a part of a value of its type that is large enough, or a ramp of constants."""
    sample, count = pool.samples[name], int(np.prod(shape))
    found = [
        n for n, s in pool.samples.items()
        if s.dtype is sample.dtype and s.type.policy == sample.type.policy and s.size >= count
    ]  # fmt: skip
    ramp = f"ts.cast(ts.reshape(ts.arange({count}) % 5 - 2, {shape}), dtype={name}.dtype)"
    return c.pick((ramp, *(f"ts.reshape(ts.reshape({n}, (-1,))[:{count}], {shape})" for n in found)))


@rule(lambda s: has_axes(s) and is_number(s) and s.size <= 600, 2)
def _contract(c: Choices, pool: ValuePool, name: str) -> str:
    sample = pool.samples[name]
    size = sample.shape[-1]
    letters = "abcd"[: sample.ndim]
    weights = _draw_weights(c, pool, name, (size, 3))
    return c.pick((
        f"ts.einsum('{letters},{letters[-1]}z->z{letters[:-1]}', {name}, {weights})",
        f"ts.einsum('{letters},{letters}->{letters[::-1][: c.draw(3)]}', {name}, {name})",
        f"ts.tensordot({name}, {weights}, 1)", f"ts.vecdot({name}, {name})",
        f"ts.outer(ts.reshape({name}, (-1,))[:40], ts.reshape({name}, (-1,))[-30:])",
        f"ts.kron({name}, {_draw_weights(c, pool, name, (2,) * sample.ndim)})",
        f"ts.linear({name}, {_draw_weights(c, pool, name, (3, size))}, {_draw_weights(c, pool, name, (3,))})",
        f"ts.matmul({_draw_weights(c, pool, name, (2, 3, size))}, {weights})",
    ))  # fmt: skip


@rule(_is_small, 2)
def _convolve(c: Choices, pool: ValuePool, name: str) -> str:
    """A convolution of the value as signals of one or two channels."""
    size, channels = pool.samples[name].size, 1 + c.draw(2)
    width, stride, dilation, padding = 1 + c.draw(4), 1 + c.draw(3), 1 + c.draw(2), c.draw(3)
    how = f"stride={stride}, padding={padding}, dilation={dilation}"
    length = size // channels
    signal = f"ts.reshape(ts.reshape({name}, (-1,))[:{length * channels}], (1, {channels}, {length}))"
    if c.chance(3):
        rows = 1 + c.draw(4)
        image = f"ts.reshape(ts.reshape({name}, (-1,))[:{size // rows * rows}], (1, 1, {rows}, {size // rows}))"
        return f"ts.conv2d({image}, {_draw_weights(c, pool, name, (2, 1, min(rows, 2), width))}, {how})"
    if c.chance(3):
        back = _draw_weights(c, pool, name, (channels, 2, width))
        return f"ts.conv_transpose1d({signal}, {back}, {how})"
    groups = c.pick((1, channels))
    weights = _draw_weights(c, pool, name, (2 * groups, channels // groups, width))
    return f"ts.conv1d({signal}, {weights}, {how}, groups={groups})"


@rule(_is_small, 2)
def _window(c: Choices, pool: ValuePool, name: str) -> str:
    size = pool.samples[name].size
    rows = 1 + c.draw(3)
    width = 1 + c.draw(3)
    how = f"{width}, stride={1 + c.draw(3)}, padding={c.draw(width // 2 + 1)}"
    signal = f"ts.reshape({name}, (1, 1, {size}))"
    image = f"ts.reshape(ts.reshape({name}, (-1,))[:{size // rows * rows}], (1, 1, {rows}, {size // rows}))"
    ceil = f", ceil_mode={c.pick((False, True))}"
    return c.pick((
        f"ts.max_pool1d({signal}, {how}{ceil})", f"ts.avg_pool1d({signal}, {how}{ceil})",
        f"ts.max_pool2d({image}, {how}{ceil})", f"ts.avg_pool2d({image}, {how}{ceil})",
        f"ts.max_pool1d({signal}, {how}, return_indices=True)[1]", f"ts.adaptive_avg_pool1d({signal}, {1 + c.draw(4)})",
        f"ts.interpolate({signal}, size={1 + c.draw(9)}, mode={c.pick(('nearest', 'linear'))!r})",
    ))  # fmt: skip


@rule(lambda s: s.ndim > 0 and is_float(s), 2)
def _layer(c: Choices, pool: ValuePool, name: str) -> str:
    sample = pool.samples[name]
    axis, size = c.draw(sample.ndim), sample.shape[-1]
    scale = _draw_weights(c, pool, name, (size,)) if size else "None"
    table = f"ts.reshape({name}, (-1, {max(size, 1)}))"
    return c.pick((
        f"ts.layer_norm({name}, {scale}, {scale})", f"ts.rms_norm({name}, {scale})", f"ts.norm({name}, axis={axis})",
        f"ts.norm({name}, ord={c.pick((1, 'inf', 3))!r}, axis={axis})".replace("'inf'", "float('inf')"),
        f"ts.cosine_similarity({name}, {name}[::-1], axis={axis})", f"ts.glu({name}, axis={axis})",
        f"ts.softmin({name}, axis={axis})", f"ts.compensated_sum({name}, axis={axis})",
        f"ts.lerp({name}, {name}[::-1], 0.25)", f"ts.mse_loss({name}, {name}[::-1])",
        f"ts.smooth_l1_loss({name}, {name}[::-1])", f"ts.kl_div(ts.log_softmax({name}), ts.softmax({name}[::-1]))",
        f"ts.cross_entropy({table}, ts.arange({table}.shape[0]) % {max(size, 1)})",
        f"ts.binary_cross_entropy_with_logits({name}, ts.sigmoid({name}[::-1]))",
        f"ts.batch_norm({table})", f"ts.group_norm(ts.reshape({name}, (1, -1, 1)), 1)", f"ts.lp_normalize({name})",
    ))  # fmt: skip


@rule(lambda s: _is_small(s) and s.ndim >= 2, 1)
def _attend(c: Choices, pool: ValuePool, name: str) -> str:
    shape = pool.samples[name].shape
    heads = f"ts.reshape({name}, (1, 1, -1, {shape[-1]}))"
    how = c.pick(("", ", causal=True", ", scale=0.5", ", softcap=2.0", ", causal=True, window=2"))
    return f"ts.scaled_dot_product_attention({heads}, {heads}, {heads}[:, :, ::-1]{how})"


@rule(is_float)
def _scalar_function(c: Choices, pool: ValuePool, name: str) -> str:
    op = c.pick(
        "cbrt celu clip digamma erfc erfinv hardshrink hardsigmoid hardtanh lgamma relu6 softshrink tanhshrink "
        "bessel_i0e bessel_i1e positive".split()
    )
    return f"ts.{op}({name}{', -1, 1' if op == 'clip' else ''})"


@rule(is_number)
def _bits(c: Choices, pool: ValuePool, name: str) -> str:
    same = {8: "uint8", 16: "int16", 32: "int32", 64: "int64"}
    kind = same.get(pool.samples[name].dtype.bits, "int32")
    return c.pick((
        f"ts.bitcast({name}, dtype=ts.{kind})", f"ts.reduce_precision({name}, 5, 4)", f"ts.population_count({name})",
        f"ts.count_leading_zeros({name})", f"ts.nextafter({name}, {name} * 0)", f"ts.isclose({name}, {name} + 1)",
    ))  # fmt: skip
