"""Size padding: results do not depend on what lies past the sizes, here NaN, for every padded axis."""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.padded_sizes import cut_array
from tessera.core.errors import OutOfBoundsError, UnsupportedOpError
from tessera.core.symbolic_dim import Dim
from tessera.interp import graph
from tessera.lower.passes.size_padding import pad_sizes, split_factors

UPPER = {"B": 9, "S": 12}
PROGRAMS = {
    "pointwise": lambda x: ts.tanh(x) * 2.0 + 1.0,
    "row-sum": lambda x: ts.sum(x, axis=-1),
    "sums-of-all": lambda x: (ts.sum(x), ts.sum(ts.full((x.shape[0], 3), 2.0))),
    "column-max": lambda x: ts.max(x, axis=0, keepdims=True),
    "minimum": lambda x: ts.min(ts.abs(x), axis=0),
    "mean-and-variance": lambda x: (ts.mean(x), ts.var(x, axis=-1)),
    "softmax": lambda x: ts.softmax(x, axis=0),
    "logsumexp": lambda x: ts.logsumexp(x, axis=1),
    "argmax": lambda x: (ts.argmax(x, axis=-1), ts.argmin(x, axis=0)),
    "any": lambda x: (ts.any(x > 1.0, axis=1), ts.all(x > -1.0, axis=0)),
    "integers": lambda x: ts.max((x * 10.0).to("int32"), axis=1),
    "transpose": lambda x: ts.permute(x, (1, 0)) + 1.0,
    "flatten": lambda x: ts.reshape(x, (-1,)) * 3.0,
    "flat-softmax": lambda x: ts.softmax(ts.reshape(x, (-1,)), axis=0),
    "heads": lambda x: ts.sum(ts.reshape(ts.exp(x)[:, :, None] * ts.ones((8,)), (*x.shape, 2, 4)), axis=2),
    "sizes": lambda x: x / (x.shape[0] // 2 + 1) + x.shape[1] % 3,
    "product": lambda x: ts.matmul(ts.log(ts.abs(x)), ts.permute(x, (1, 0))),
    "vectors": lambda x: ts.matmul(x[0], ts.permute(x, (1, 0))),
    "one-row": lambda x: ts.exp(x)[0:1],
    "padded": lambda x: ts.pad(x, ((1, 2), (0, 3))),
    "running": lambda x: (ts.cumsum(x, axis=0), ts.cumprod(x, axis=-1)),
    "flat-running": lambda x: ts.cumsum(ts.reshape(x[:, :1] * ts.ones((3,)), (-1,))),
    "products": lambda x: (ts.prod(x, axis=0), ts.prod(x), ts.prod(x, axis=-1, keepdims=True)),
    "stacks": lambda x: (ts.stack([x, x + 1.0]), ts.stack([x, x + 1.0], axis=-1), ts.stack([x, x * 2.0], axis=1)),
    "flips": lambda x: (ts.flip(x, axis=0), ts.flip(x), ts.repeat(x, 3, axis=1)),
    "ranges": lambda x: (x * ts.arange(x.shape[1]), ts.arange(1, 2 * x.shape[0] + 1, 2)),
    "places from the end": lambda x: tuple(ts.take(x, ts.arange(2) - 1, axis=a) for a in (0, 1)),
    "gradient": lambda x: ts.grad(lambda y: ts.mean(ts.softmax(y, axis=1) ** 2))(x),
}


def pad(function, shape=(9, 12)):
    x = np.ones(shape, np.float32)
    traced = ts.jit(function).trace_dynamic((x,), {}, {"x": {0: "B", 1: "S"}})
    return pad_sizes(traced.function, UPPER)


@pytest.mark.parametrize("name", PROGRAMS)
def test_padding_is_never_read(name, rng):
    padded = pad(PROGRAMS[name])
    for rows, columns in ((9, 12), (1, 1), (5, 7), (9, 1), (1, 12)):
        x, full = rng.standard_normal((rows, columns)).astype("f4"), np.full((9, 12), np.nan, "f4")
        full[:rows, :columns] = x
        sizes = {"B": rows, "S": columns}
        found = graph.run(padded.function, [full, *(np.int32(sizes[n]) for n in padded.names)])
        wanted = PROGRAMS[name](ts.tensor(x))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for a, layout, want in zip(found, padded.results, wanted, strict=True):
            cut = cut_array(np.asarray(a), layout, UPPER, sizes)
            assert cut.shape == tuple(want.shape)
            np.testing.assert_allclose(cut, want.numpy(), rtol=1e-4, atol=1e-5)


REFUSED = {
    "gather": lambda x: ts.flip(ts.reshape(x, (-1,)), axis=0),
    "cumsum": lambda x: ts.cumsum(ts.reshape(x, (-1,)), axis=0),
    "slice": lambda x: ts.reshape(x, (-1,))[1:],
    "concatenate": lambda x: ts.concatenate([x, x], axis=0),
    "argmax": lambda x: ts.argmax(ts.reshape(x, (-1,)), axis=0),
    "add": lambda x: ts.reshape(x, (-1,)) + ts.reshape(ts.permute(x, (1, 0)), (-1,)),
    "while_loop": lambda x: ts.while_loop(lambda v: ts.sum(v) < 0.0, lambda v: v + 1.0, x),
}


@pytest.mark.parametrize("op", REFUSED)
def test_what_would_mix_padding_with_elements_is_refused(op):
    with pytest.raises(UnsupportedOpError, match=rf"ts\.{op} cannot run on arrays that are padded along ") as error:
        pad(REFUSED[op])
    assert error.value.location.file == __file__


def test_factors_of_reshaped_axes():
    b, s = Dim.of("B"), Dim.of("S")
    assert split_factors(((b, s), (8,)), (b, s, 8)) == ((b,), (s,), (8,))
    assert split_factors(((b,), (6,)), (b * 2, 3)) == ((b, 2), (3,))
    assert split_factors(((b,), (1,), (s,)), (b, s)) == ((b,), (s,))
    assert split_factors(((b,), (s,)), (s, b)) is None
    assert split_factors(((b * s,),), (b, s)) is None


@pytest.mark.parametrize("shape", [(0, 12), (9, 0)])
@pytest.mark.parametrize("name", ["stacks", "flatten", "heads", "transpose", "padded", "running"])
def test_axes_without_elements(name, shape):
    x = np.zeros(shape, np.float32)
    traced = ts.jit(PROGRAMS[name]).trace_dynamic((x,), {}, {"x": {a: "BS"[a] for a in (0, 1) if shape[a]}})
    padded = pad_sizes(traced.function, UPPER)
    sizes = {n: 5 for n in padded.names}
    found = graph.run(padded.function, [x, *(np.int32(5) for _ in padded.names)])
    wanted = PROGRAMS[name](ts.tensor(x[:5, :5]))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for a, layout, want in zip(found, padded.results, wanted, strict=True):
        np.testing.assert_array_equal(cut_array(np.asarray(a), layout, UPPER, sizes), want.numpy())


@pytest.mark.parametrize("index", [5, 8, 9, -6, -9, -10])
def test_an_index_of_padding_is_outside(index):
    x = np.zeros((9, 12), np.float32)
    padded = pad(lambda x: ts.take(x, ts.arange(1) + index, axis=0))
    sizes = {"B": np.int32(5), "S": np.int32(12)}
    with pytest.raises(OutOfBoundsError):
        graph.run(padded.function, [x, *(sizes[n] for n in padded.names)])
