"""ts.build and ts.load: what is stored, what is asked for, and what is refused."""

import dataclasses

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.artifact import read_artifact
from tessera.core.errors import ArgumentError, ArtifactError, DTypeError, ShapeError, TesseraError, UnsupportedOpError

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_weights_are_stored_and_not_asked_for(tmp_path):
    @ts.jit
    def f(params, x):
        return x @ params["w"] + params["b"]

    params = {"w": np.eye(3, dtype=np.float32) * 2, "b": np.ones(3, np.float32)}
    ts.build(f, params, X, out=tmp_path / "a", weights=("params",))
    loaded = ts.load(tmp_path / "a")
    assert [p["name"] for p in loaded.parameters] == ["x"]
    assert np.array_equal(loaded(X).numpy(), X * 2 + 1)


def test_narrow_weights_keep_their_type(tmp_path):
    w = np.arange(4).astype(ts.bf16.numpy)
    ts.build(ts.jit(lambda w, x: w * x), w, w, out=tmp_path / "a", weights=("w",))
    out = ts.load(tmp_path / "a")(w)
    assert out.dtype == ts.bf16 and np.array_equal(out.numpy().astype(float), [0, 1, 4, 9])


def test_captured_arrays_travel_along(tmp_path):
    bias = np.float32([1, 2, 3])
    ts.build(ts.jit(lambda x: x + bias), X, out=tmp_path / "a")
    assert np.array_equal(ts.load(tmp_path / "a")(X).numpy(), X + bias)


def test_kernels_write_in_place(tmp_path):
    @ts.kernel
    def double(x, y):
        i = ts.tile.program_id(0)
        y[i] = x[i] * 2.0

    x, y = np.float32([1, 2, 3]), np.zeros(3, np.float32)
    ts.build(double, x, y, out=tmp_path / "k", grid=(3,))
    ts.load(tmp_path / "k")(x, y)
    assert np.array_equal(y, [2, 4, 6])


@ts.kernel
def scale(x, y, *, BLOCK: int = 1, factor: float = 2.0):
    i = ts.tile.program_id(0) * BLOCK
    y[i : i + BLOCK] = x[i : i + BLOCK] * factor


@pytest.mark.parametrize("bind", (lambda k: (k, {"grid": (2,), "group": 1}), lambda k: (k[(2,), 1], {})))
def test_a_build_takes_arguments_as_a_launch_does(bind, tmp_path):
    x, y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    entry, launch = bind(scale)
    ts.build(entry, x, y, BLOCK=4, factor=3.0, out=tmp_path / "k", **launch)
    ts.load(tmp_path / "k")(x, y)
    assert np.array_equal(y, x * 3)


def test_a_second_grid_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"the grid of <kernel scale> is set twice"):
        ts.build(scale[(2,)], X[0], X[0], out=tmp_path / "k", grid=(3,))


def test_several_results(tmp_path):
    ts.build(ts.jit(lambda x: (x + 1.0, ts.sum(x, axis=1))), X, out=tmp_path / "a")
    first, second = ts.load(tmp_path / "a")(X)
    assert np.array_equal(first.numpy(), X + 1) and np.array_equal(second.numpy(), [3, 12])


@pytest.fixture
def doubled(tmp_path):
    """An artifact that doubles a 2x3 f32 array."""
    return ts.load(ts.build(ts.jit(lambda x: x * 2.0), X, out=tmp_path / "double"))


@pytest.mark.parametrize(
    ("arrays", "error", "says"),
    [
        ((X[:1],), ShapeError, "argument x has another shape than the artifact was built for"),
        ((X.astype(np.float64),), DTypeError, "argument x has another element type"),
        ((X.astype(np.int32),), DTypeError, "argument x has another element type"),
        ((), ArgumentError, "takes 1 array, received 0"),
    ],
)
def test_wrong_calls(doubled, arrays, error, says):
    with pytest.raises(error, match=says):
        doubled(*arrays)


def test_a_name_of_weights_is_a_whole_name(tmp_path):
    ts.build(ts.jit(lambda w, wide: w + wide), X, X, out=tmp_path / "a", weights=("w",))
    assert [p["name"] for p in ts.load(tmp_path / "a").parameters] == ["wide"]
    with pytest.raises(ArgumentError, match="has no argument wi"):
        ts.build(ts.jit(lambda w, wide: w + wide), X, X, out=tmp_path / "b", weights=("wi",))


def test_unknown_weights(tmp_path):
    with pytest.raises(ArgumentError, match="has no argument wieghts"):
        ts.build(ts.jit(lambda x: x), X, out=tmp_path / "a", weights=("wieghts",))
    assert not (tmp_path / "a").exists()


def test_what_the_target_lacks_is_named_with_its_line(tmp_path):
    @ts.jit
    def narrow(x):
        return x.to(ts.f64).to(ts.bf16 @ ts.toward_zero)

    with pytest.raises(UnsupportedOpError) as caught:
        ts.build(narrow, X, out=tmp_path / "a")
    text = str(caught.value)
    assert "llvm" in text and "toward_zero" in text and "return x.to(ts.f64).to(ts.bf16 @ ts.toward_zero)" in text
    assert not (tmp_path / "a").exists()


def test_a_folder_that_is_no_artifact(tmp_path):
    with pytest.raises(ArtifactError, match="has no manifest.json"):
        ts.load(tmp_path)
    with pytest.raises(ArtifactError, match="there is no folder"):
        ts.load(tmp_path / "nowhere")


def test_called_as_the_function_was(tmp_path):
    """Containers are taken apart, names may be used, and what is stored is left out."""

    def scaled(params, x):
        return x @ params["w"] + params["b"]

    params = {"w": np.eye(3, dtype=np.float32) * 2, "b": np.ones(3, np.float32)}
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    whole = ts.load(ts.build(ts.jit(scaled), params, x, out=tmp_path / "whole"))
    alone = ts.load(ts.build(ts.jit(scaled), params, x, out=tmp_path / "alone", weights=["params"]))
    for found in (whole(params, x), whole(params, x=x), whole(x=x, params=params), alone(x), alone(x=x)):
        np.testing.assert_array_equal(found.numpy(), 2 * x + 1)
    assert repr(alone) == "<scaled for llvm: x: 2x3xf32>"
    with pytest.raises(ArgumentError, match=r"test_artifacts.py:\d+.*scaled has no argument y"):
        alone(y=x)
    with pytest.raises(ArgumentError, match="scaled takes 1 array, received 3"):
        alone(params, x)


def test_the_csl_of_an_artifact_reads_no_other_file(tmp_path):
    (tmp_path / "secret.csl").write_text("const x = 1;")
    folder = ts.build(ts.jit(lambda x: x * 2.0), X, out=tmp_path / "a", target="csl")
    made = read_artifact(folder)
    text = made.text("pe_program.csl") + f'\nconst secret = @import_module("{tmp_path}/secret.csl");\n'
    text += "comptime { _ = secret.x; }\n"
    dataclasses.replace(made, files={**made.files, "pe_program.csl": text}).save(folder)
    with pytest.raises(TesseraError, match="unable to find module"):
        ts.load(folder)(X)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x08" + b"\0" * 7 + b'{"w":1}'])
def test_weights_that_are_no_safetensors(tmp_path, content):
    folder = ts.build(ts.jit(lambda w, x: w * x), X, X, out=tmp_path / "a", weights=("w",))
    made = read_artifact(folder)
    dataclasses.replace(made, files={**made.files, "weights.safetensors": content}).save(folder)
    with pytest.raises(ArtifactError, match=r"weights\.safetensors does not hold the stored parameters"):
        ts.load(folder)
