"""Exported text: JAX's and xDSL's parsers read it, XLA runs it to the values of Tessera, and it is imported again."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax._src import xla_bridge  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402
from jax_functions import CASES  # noqa: E402
from jaxlib import _jax  # noqa: E402
from jaxlib.mlir import ir  # noqa: E402

import tessera as ts  # noqa: E402
from tessera.errors import UnsupportedOpError  # noqa: E402

RNG = np.random.default_rng(3)
X, Y = RNG.standard_normal((2, 4, 6)).astype("f4")
HALF, PLACES = X.astype("f2"), np.array([3, -1, 0])
KERNEL = RNG.standard_normal((2, 2, 3, 3)).astype("f4")
TABLE = RNG.standard_normal((6, 3)).astype("f4")


def loss(w, x):
    return ts.cross_entropy(ts.relu(x @ w), ts.Tensor([0, 1, 2, 0]))


def walk(x):
    return ts.while_loop(cond=lambda x, i: x.sum() < 100.0, body=lambda x, i: (x * 2.0, i + 1), init=(ts.abs(x), 0))


PROGRAMS = {
    "pointwise": (
        lambda x, y: (ts.exp2(x) + ts.log2(ts.abs(y)), x % y, x // y, ts.erf(x), ts.sigmoid(y), ts.gelu(x)),
        X,
        Y,
    ),
    "integers": (lambda i: (i % 5, i // 5, i << 2, i >> 1, ~i, i**3, ts.argmax(i)), PLACES * 7),
    "half": (lambda x: (x.sum(axis=0), ts.softmax(x), x @ x.T, ts.cumsum(x, 1)), HALF),
    "reductions": (
        lambda x: (x.max(axis=1), x.min(), ts.argmax(x, 0), ts.argmin(x, 1), ts.all(x > -9.0), ts.prod(x, 1)),
        X,
    ),
    "indexing": (
        lambda x, i: (x[i], ts.scatter_add(x, i, x[:3]), ts.scatter(x, i, x[:3], mode="max"), ts.sort(x)),
        X,
        PLACES,
    ),
    "sorting": (lambda x: (ts.argsort(x, descending=True), ts.topk(x, 2)), np.float32([2, np.nan, -1, np.inf, 2])),
    "constants": (lambda x: (x @ ts.Tensor(TABLE), ts.where(ts.Tensor(X > 0), x, ts.nan)), X),
    "scan": (lambda x: ts.scan(lambda c, a: (c * 0.5 + a, c.sum()), x[0], x, reverse=True), X),
    "branch": (lambda x: ts.cond(x.sum() > 0.0, lambda a: a * 2.0, lambda a: -a, x), X),
    "while": (walk, X),
    "training": (lambda w, x: ts.value_and_grad(loss)(w, x), TABLE, X),
    "convolution": (lambda x, w: ts.conv2d(x, w, padding=1), X.reshape(1, 2, 3, 4), KERNEL),
}


def run_on_xla(text, args):
    backend = xla_bridge.get_backend()
    devices = _jax.DeviceList(tuple(backend.local_devices()[:1]))
    program = backend.compile_and_load(text, devices, _jax.CompileOptions())
    with jax.enable_x64(True):
        given = [jax.device_put(np.asarray(x)) for x in args]
    found = program.execute_sharded(given).disassemble_into_single_device_arrays()
    return [np.asarray(each[0]) for each in found]


def check_parsers(text):
    with mlir.make_ir_context():
        ir.Module.parse(text).operation.verify()
    pytest.importorskip("xdsl", reason="xdsl is not installed")
    from xdsl.context import Context
    from xdsl.dialects.builtin import Builtin
    from xdsl.dialects.func import Func
    from xdsl.parser import Parser

    context = Context(allow_unregistered=True)
    context.load_dialect(Builtin)
    context.load_dialect(Func)
    Parser(context, text).parse_module().verify()


def check_same(found, want):
    for a, b in zip(found, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        bound = 1e-2 if a.dtype.itemsize == 2 else 3e-5
        np.testing.assert_allclose(a.astype("f8"), b.astype("f8"), bound, bound)


@pytest.mark.parametrize("name", PROGRAMS)
def test_xla_runs_it_to_the_same_values(name):
    function, *args = PROGRAMS[name]
    text = ts.stablehlo.export(function, *args)
    check_parsers(text)
    want = [x.numpy() for x in jax.tree.leaves(ts.jit(function)(*args), is_leaf=lambda x: isinstance(x, ts.Tensor))]
    check_same(run_on_xla(text, args), want)
    again = ts.stablehlo.load(text)(*args)
    check_same([x.numpy() for x in (again if isinstance(again, tuple) else (again,))], want)


@pytest.mark.parametrize(
    "name", ["normal", "scan_gradient", "max_pool_gradient", "scatter_windows", "sort_pairs", "switch"]
)
def test_programs_of_jax_there_and_back(name):
    function, *args = CASES[name]
    lowered = jax.jit(function).lower(*args)
    text = ts.stablehlo.export(ts.stablehlo.load(lowered.as_text()), *args)
    check_parsers(text)
    check_same(run_on_xla(text, args), [np.asarray(x) for x in jax.tree.leaves(lowered.compile()(*args))])


def test_same_text_and_the_lines_of_the_program():
    def double(x):
        return x + x

    text = ts.stablehlo.export(double, X)
    assert text == ts.stablehlo.export(double, X)
    assert f'loc("{__file__}":{double.__code__.co_firstlineno + 1}:15)' in text


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (lambda x: ts.linalg.svdvals(x), (X,), "ts.svd has no form"),
        (lambda x: x + ts.rand((4, 6)), (X,), "draws from the default generator"),
        (lambda x: x * 2.0, (ts.Tensor["N"],), "fixed sizes"),
        (lambda x: x.to(ts.bf16 @ ts.stochastic_round), (X,), "numeric policies"),
    ],
)
def test_refusals(function, args, message):
    with pytest.raises(UnsupportedOpError, match=message):
        ts.stablehlo.export(function, *args)
