"""Artifacts of symbolic sizes: built once, they take every size that their constraints allow."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.core.errors import ArgumentError, ArtifactError, ResourceError, ShapeError


@ts.jit
@ts.require("B <= 300")
def encode(x: ts.Tensor["B", "S", 8], w: ts.Tensor[8, 12]):
    """Attention of each row on the others, and the mean."""
    h = ts.linear(x, w)
    mixed = ts.matmul(ts.softmax(ts.matmul(h, ts.permute(h, (0, 2, 1)))), h)
    return mixed, ts.mean(mixed, axis=1)


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module", params=["llvm", "ptx"])
def artifact(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "a"
    ts.build(encode, draw(4, 16, 8), draw(8, 12), out=out, target=request.param, dynamic=True, weights=["w"])
    return request.param, out, ts.load(out)


@settings(max_examples=12)
@given(batch=st.sampled_from([1, 2, 5, 17]), length=st.sampled_from([1, 3, 16, 33]))
def test_any_size_is_as_in_the_interpreter(artifact, batch, length):
    _, _, program = artifact
    x = draw(batch, length, 8)
    for found, want in zip(program(x), encode.function(ts.Tensor(x), ts.Tensor(draw(8, 12))), strict=True):
        np.testing.assert_allclose(found.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)


def test_the_interface_shows_the_names(artifact):
    assert "x: BxSx8xf32" in repr(artifact[2])
    manifest = json.loads((artifact[1] / "manifest.json").read_text())
    assert manifest["plan"]["sizes"] == ["B", "S"] and manifest["plan"]["constraints"] == ["B <= 300"]


def test_sizes_outside_the_constraints_are_refused(artifact):
    program = artifact[2]
    with pytest.raises(ShapeError, match="B <= 300 does not hold"):
        program(draw(301, 1, 8))
    with pytest.raises(ShapeError, match="the size S is 0"):
        program(draw(2, 0, 8))
    with pytest.raises(ShapeError, match="axis 2: expected 8, received 9"):
        program(draw(2, 2, 9))


def test_a_call_may_not_ask_for_more_than_the_limit(artifact):
    program = ts.load(artifact[1], max_bytes=1 << 20)
    with pytest.raises(ResourceError, match="bytes of memory"):
        program(draw(200, 200, 8))


def test_the_same_build_gives_the_same_bytes(tmp_path):
    texts = []
    for name in "ab":
        ts.build(encode, draw(4, 16, 8), draw(8, 12), out=tmp_path / name, dynamic=True)
        texts.append((tmp_path / name / "kernels.ll").read_bytes())
    assert texts[0] == texts[1]


def test_an_expression_binds_its_name(tmp_path):
    pairs = ts.jit(lambda x: ts.sum(ts.reshape(x, (x.shape[0] // 2, 2)), axis=1))
    ts.build(pairs, draw(4), out=tmp_path / "a", dynamic={"x": {0: "2*N"}})
    program = ts.load(tmp_path / "a")
    for size in (2, 10, 66):
        np.testing.assert_allclose(program(draw(size)).numpy(), draw(size).reshape(-1, 2).sum(1), rtol=1e-5)
    with pytest.raises(ShapeError, match="expected 2"):
        program(draw(7))


def test_wrong_names_are_said(tmp_path):
    double = ts.jit(lambda x: x * 2.0)
    with pytest.raises(ArgumentError, match="no array 'y'"):
        ts.build(double, draw(3), out=tmp_path / "a", dynamic={"y": {0: "B"}})
    with pytest.raises(ShapeError, match="axis 3 is out of range"):
        ts.build(double, draw(3), out=tmp_path / "a", dynamic={"x": {3: "B"}})
    for name in ("?", "..."):
        with pytest.raises(ArgumentError, match="is no name of a size"):
            ts.build(double, draw(3), out=tmp_path / "a", dynamic={"x": {0: name}})
    with pytest.raises(ArgumentError, match="no axis says what the size B is"):
        ts.build(double, draw(6), out=tmp_path / "a", dynamic={"x": {0: "B*S"}})
    with pytest.raises(ArgumentError, match="no size is named"):
        ts.build(ts.jit(lambda x: x * 2.0), np.float32(3), out=tmp_path / "a", dynamic=True)


def test_a_corrupt_size_is_refused(artifact, tmp_path):
    from tessera.codegen.artifact import bind_plan, parse_size

    for text in (
        "__import__('os')",
        "1//0",
        "B**9",
        "(" * 400 + "B" + ")" * 400,
        "",
        "B" * 20_000,
        3,
        None,
        "9" * 999 + "*B %",
    ):
        with pytest.raises(ArtifactError, match="is not a size"):
            parse_size({"size": text})
    with pytest.raises(ArtifactError, match="the plan has no size"):
        bind_plan({"size": "8 // (B - 1)"}, {"B": 1})
    with pytest.raises(ArtifactError, match="the plan has no size"):
        bind_plan({"grid": [{"size": "Q"}]}, {"B": 1})


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_a_stated_divisor_leaves_no_partial_tiles(tmp_path, target):
    @ts.jit
    @ts.require("S % 64 == 0")
    def scores(x: ts.Tensor["B", "S"]):
        return ts.softmax(ts.tanh(x), axis=-1)

    ts.build(scores, draw(4, 128), out=tmp_path / "a", target=target, dynamic=True)
    text = (tmp_path / "a" / "tile.mlir").read_text()
    assert 'edge = "error"' in text and 'edge = "clip"' not in text and "ts.less" not in text
    program = ts.load(tmp_path / "a")
    for length in (64, 192):
        x = draw(3, length)
        np.testing.assert_allclose(program(x).numpy(), scores.function(ts.Tensor(x)).numpy(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match="S % 64 == 0 does not hold"):
        program(draw(2, 65))


def test_constraints_follow_the_names_of_the_program(tmp_path):
    """Constraints use the names of annotations: here B is the program's N, and D a number."""

    @ts.jit
    @ts.require("B * D <= 64")
    def f(x: ts.Tensor["B", "D"]):
        ts.require("B % 2 == 0")
        return x + 1.0

    ts.build(f, draw(4, 8), out=tmp_path / "a", dynamic={"x": {0: "N"}})
    program = ts.load(tmp_path / "a")
    np.testing.assert_array_equal(program(draw(8, 8)).numpy(), draw(8, 8) + 1)
    for rows, text in ((10, r"8\*N <= 64"), (3, "N % 2 == 0")):
        with pytest.raises(ShapeError, match=f"{text} does not hold") as error:
            program(draw(rows, 8))
        assert f"as {__file__}:" in error.value.expected
