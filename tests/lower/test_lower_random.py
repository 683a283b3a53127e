"""Random programs of whole numbers, which f32 holds exactly: every level gives the same bits.

Each step takes tensors made before and keeps its result between 0 and 15, so that no sum can round.
"""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.ops.tensor import basic, contractions, nn, reduce, shape
from tessera.ops.tensor import elementwise as e
from tests.lower.levels import agree

SHAPES = [(), (6,), (4, 6), (6, 4), (2, 3, 4), (6, 1), (3, 2, 2, 2)]


def small(x):
    return e.remainder(x, 16.0)


def fitted(x, shape_):
    """`x` made to have a shape, by whatever views that takes."""
    flat = x.reshape(math.prod(x.shape))
    size = math.prod(shape_)
    while flat.shape[0] < size:
        flat = shape.concatenate([flat, flat])
    return shape.slice_(flat, start=(0,), stop=(size,)).reshape(shape_)


def pointwise(draw, x, y):
    y = fitted(y, x.shape)
    ops = [e.add, e.sub, e.mul, e.maximum, lambda a, b: e.where(a > b, a, b + 1), lambda a, b: e.exp2(a - a) + b]
    return small(draw(st.sampled_from(ops))(x, y))


def expensive(draw, x, y):
    return e.exp2(e.remainder(x, 4.0))


def permute(draw, x, y):
    return x.permute(*draw(st.permutations(range(x.ndim))))


def reshape(draw, x, y):
    size = math.prod(x.shape)
    fits = [s for s in [(size,), (size, 1), (2, size // 2), (size // 3, 3), (2, size // 4, 2)] if math.prod(s) == size]
    return x.reshape(draw(st.sampled_from(fits)))


def broadcast(draw, x, y):
    return basic.broadcast_to(x, shape=(draw(st.integers(1, 3)), *x.shape)) if x.ndim < 4 else x


def repeat(draw, x, y):
    axis, times = draw(st.integers(0, x.ndim - 1)), draw(st.integers(2, 3))
    before, after = x.shape[: axis + 1], x.shape[axis + 1 :]
    wide = basic.broadcast_to(x.reshape(*before, 1, *after), shape=(*before, times, *after))
    return wide.reshape(*before[:-1], before[-1] * times, *after)


def slices(draw, x, y):
    start = [draw(st.integers(0, n - 1)) for n in x.shape]
    step = [draw(st.integers(1, 2)) for _ in x.shape]
    return shape.slice_(x, start=tuple(start), stop=x.shape, step=tuple(step))


def pad(draw, x, y):
    low, high = ([draw(st.integers(0, 2)) for _ in x.shape] for _ in range(2))
    return shape.pad(x, low=tuple(low), high=tuple(high), value=3)


def join(draw, x, y):
    axis = draw(st.integers(0, x.ndim - 1))
    sizes = [*x.shape]
    sizes[axis] = draw(st.integers(1, 3))
    return shape.concatenate([x, fitted(y, tuple(sizes))], axis=axis)


def take(draw, x, y):
    axis = draw(st.integers(0, x.ndim - 1))
    places = e.remainder(fitted(y, (draw(st.integers(1, 3)), 2)), float(x.shape[axis])).to("int32")
    return shape.gather(x, places, axis=axis) if x.ndim < 4 else x


def combine(draw, x, y):
    op = draw(st.sampled_from([reduce.sum, reduce.max, reduce.min]))
    axes = draw(st.lists(st.integers(0, x.ndim - 1), min_size=1, unique=True))
    return small(op(x, axis=tuple(axes), keepdims=draw(st.booleans())))


def rows(draw, x, y):
    axis = draw(st.integers(0, x.ndim - 1))
    return small(x - reduce.max(x, axis=axis, keepdims=True) + reduce.sum(x, axis=axis, keepdims=True))


def place(draw, x, y):
    op = draw(st.sampled_from([reduce.argmax, reduce.argmin]))
    return op(x, axis=draw(st.integers(0, x.ndim - 1))).to("f32")


def product(draw, x, y):
    k, n = x.shape[-1], draw(st.sampled_from([1, 4, 5]))
    return small(contractions.matmul(x, fitted(y, (k, n)))) if math.prod(x.shape) < 500 else x


def gram(draw, x, y):
    return small(contractions.matmul(x, shape.transpose(x))) if x.ndim > 1 and math.prod(x.shape) < 200 else x


def relu(draw, x, y):
    return nn.relu(x - 3)


ALWAYS = [pointwise, expensive, broadcast, relu]
WITH_AXES = [repeat, permute, reshape, slices, pad, join, take, combine, rows, place, product, gram]


def step(draw, values):
    x, y = (values[draw(st.integers(0, len(values) - 1))] for _ in range(2))
    if math.prod(x.shape) > 2000 or not x.ndim:
        return small(reduce.sum(x))
    return draw(st.sampled_from(ALWAYS + WITH_AXES))(draw, x, y)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_programs(data):
    draw = data.draw
    shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=2, max_size=3))
    arrays = [np.random.default_rng(i).integers(0, 16, s).astype(np.float32) for i, s in enumerate(shapes)]
    count = draw(st.integers(1, 8))

    def program(*inputs):
        values = list(inputs)
        for _ in range(count):
            values.append(step(draw, values))
        chosen = draw(st.lists(st.integers(0, len(values) - 1), max_size=2, unique=True))
        return [values[-1], *(values[i] for i in chosen)]

    agree(program, *arrays, rtol=1e-12)
