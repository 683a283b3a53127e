"""Programs of JAX, imported from their text, give the values that JAX gives."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
from jax_functions import CASES  # noqa: E402

import tessera as ts  # noqa: E402
from tessera.errors import UnsupportedOpError  # noqa: E402


def lower(function, *args, **options):
    return jax.jit(function).lower(*args).as_text(**options)


def check_results(found, want):
    found = found if isinstance(found, tuple) else (found,)
    for a, b in zip(found, jax.tree.leaves(want), strict=True):
        b = np.asarray(b)
        assert a.shape == b.shape and a.dtype.numpy == b.dtype
        scale = {2: 1e-2, 1: 0}.get(b.dtype.itemsize, 2e-5)
        exact = b.dtype.kind in "iub"
        np.testing.assert_allclose(a.numpy().astype("f8"), b.astype("f8"), *((0, 0) if exact else (scale, scale)))


@pytest.mark.parametrize("name", CASES)
def test_values_of_jax(name):
    function, *args = CASES[name]
    lowered = jax.jit(function).lower(*args)
    check_results(ts.stablehlo.load(lowered.as_text())(*args), lowered.compile()(*args))


def test_gradient_through_a_loop_of_jax():
    """A counted loop becomes a scan, so that it has a reverse-mode derivative."""
    function, *args = CASES["scan"]
    imported = ts.stablehlo.load(lower(function, *args))
    found = ts.grad(lambda x, w: ts.sum(imported(x, w)[1]), argnums=(0, 1))(*map(ts.Tensor, args))
    check_results(found, jax.grad(lambda x, w: function(x, w)[1].sum(), argnums=(0, 1))(*args))


@pytest.mark.parametrize("name", ["attention", "scatter_add_twice", "fori", "normal"])
def test_compiled_for_a_cpu(name):
    function, *args = CASES[name]
    compiled = ts.jit(ts.stablehlo.load(lower(function, *args)).function, target="cpu")
    check_results(compiled(*args), jax.jit(function)(*args))


def test_built_for_a_gpu(tmp_path):
    function, *args = CASES["mlp_gradient"]
    ts.build(ts.stablehlo.load(lower(function, *args)), *args, target="ptx", out=tmp_path / "program")
    assert any(f.suffix == ".ptx" for f in (tmp_path / "program").iterdir())


def test_vmap_and_composition():
    imported = ts.stablehlo.load(lower(lambda x: jax.numpy.cumsum(x * 2), np.zeros(4, "f4"), debug_info=True))
    x = np.arange(12, dtype="f4").reshape(3, 4)
    np.testing.assert_array_equal(ts.vmap(imported)(ts.Tensor(x)).numpy(), np.cumsum(x * 2, axis=1))
    assert str(imported.signature) == "(x)"


def test_errors_name_the_line_of_the_python_program():
    def program(x):
        y = jax.numpy.sin(x)
        return jax.numpy.fft.fft(y)

    x = np.zeros(4, "f4")
    with pytest.raises(UnsupportedOpError, match="complex numbers are not supported") as caught:
        ts.stablehlo.load(lower(program, x, debug_info=True))(x)
    line = program.__code__.co_firstlineno + 2
    assert (caught.value.location.file, caught.value.location.line) == (__file__, line)
    nodes = ts.stablehlo.load(lower(lambda x: jax.numpy.sin(x), x, debug_info=True)).trace(x).function.body.nodes
    assert {n.loc.file for n in nodes} == {__file__}


def test_custom_calls_are_refused_by_name_or_given_a_meaning():
    x = np.eye(3, dtype="f4") * 4
    text = lower(jax.numpy.linalg.cholesky, x)
    with pytest.raises(UnsupportedOpError, match=r"lapack_spotrf\w* is a LAPACK routine"):
        ts.stablehlo.load(text)(x)
    target = next(w.strip("@(") for w in text.split() if w.startswith("@lapack")).partition("(")[0]
    meaning = {target: lambda a: (ts.linalg.cholesky(a), ts.zeros((), dtype=ts.int32))}
    np.testing.assert_array_equal(ts.stablehlo.load(text, custom_calls=meaning)(x).numpy(), np.linalg.cholesky(x))
