"""Artifacts of symbolic sizes for csl: built for upper bounds, they take every smaller size."""

import json

import numpy as np
import pytest
from scipy import special

import tessera as ts
from tessera import tile
from tessera.codegen.artifact import SEAL_KEY, _compute_seal
from tessera.core.errors import ArtifactError, ShapeError, UnsupportedOpError


@ts.jit
@ts.require("S <= 10")
def encode(x: ts.Tensor["B", "S"], w: ts.Tensor["S", 4]):
    scores = ts.softmax(ts.matmul(x, ts.permute(x, (1, 0))), axis=-1)
    return ts.matmul(scores, ts.matmul(x, w)), ts.mean(x, axis=1)


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module", params=["csl", "csl:2x2"])
def artifact(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("padded") / "a"
    ts.build(encode, draw(6, 5), draw(5, 4), out=out, target=request.param, dynamic=True)
    return out, ts.load(out)


@pytest.mark.parametrize(("rows", "columns"), [(6, 10), (1, 1), (5, 3), (6, 5)])
def test_smaller_sizes(artifact, rows, columns):
    x, w = draw(rows, columns), draw(columns, 4)
    mixed, means = artifact[1](x, w)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mixed.numpy(), special.softmax(wide @ wide.T, axis=-1) @ wide @ w, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(means.numpy(), wide.mean(1), rtol=1e-4, atol=1e-5)


def test_sizes_above_the_bounds_are_refused(artifact):
    program = artifact[1]
    assert "x: BxSxf32" in repr(program) and "size" not in repr(program)
    with pytest.raises(ShapeError, match="the size B is 7") as error:
        program(draw(7, 3), draw(3, 4))
    assert "at most 6" in error.value.expected
    with pytest.raises(ShapeError, match="S <= 10 does not hold"):
        program(draw(2, 11), draw(11, 4))
    with pytest.raises(ShapeError, match="S is 3 elsewhere and 4 here"):
        program(draw(2, 3), draw(4, 4))
    with pytest.raises(ShapeError, match="the size B is 0"):
        program(draw(0, 3), draw(3, 4))


def test_stored_weights_and_guards(tmp_path):
    table = draw(8, 3)

    @ts.jit
    def f(x, w):
        k = 2.0 if x.shape[0] > 4 else 1.0
        return ts.matmul(x, w) * k + ts.Tensor(table)[: x.shape[0]]

    ts.build(f, draw(8, 5), draw(5, 3), out=tmp_path / "a", target="csl", dynamic={"x": {0: "B"}}, weights=["w"])
    program = ts.load(tmp_path / "a")
    for rows in (8, 5):
        want = draw(rows, 5) @ draw(5, 3) * 2 + table[:rows]
        np.testing.assert_allclose(program(draw(rows, 5)).numpy(), want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ShapeError, match="4 < B does not hold"):
        program(draw(4, 5))


@ts.kernel
def double(x: ts.Tensor["N"], out: ts.Tensor["N"], *, BM: int = 8):
    i = tile.program_id(0) * BM
    tile.store(out[i : i + BM], tile.load(x[i : i + BM], edge="clip") * 2.0, edge="clip")


def test_kernels_are_refused(tmp_path):
    entry = double[lambda c: (tile.cdiv(c["N"], 8),)]
    with pytest.raises(UnsupportedOpError, match="csl needs the value of each size"):
        ts.build(entry, draw(9), draw(9), out=tmp_path / "a", target="csl", dynamic=True)
    launched = ts.jit(lambda x: ts.launch(double, (tile.cdiv(x.shape[0], 8),), x, ts.like(x)))
    with pytest.raises(UnsupportedOpError, match=r"ts\.launch cannot run on arrays that are padded along N") as error:
        ts.build(launched, draw(9), out=tmp_path / "a", target="csl", dynamic={"x": {0: "N"}})
    assert error.value.location.file == __file__


@pytest.mark.parametrize(
    "damage",
    [
        lambda p: p.update(upper={"B": 0, "S": 10}),
        lambda p: p.update(upper={"B": 6}),
        lambda p: p.update(upper={"B": -1, "S": 10}),
        lambda p: p.update(results=3),
        lambda p: p.update(results=[[[{"size": "Q"}]]]),
        lambda p: p.update(constraints=["B"]),
        lambda p: p.pop("upper"),
    ],
)
def test_damaged_padding_is_refused(artifact, tmp_path, damage):
    import shutil

    shutil.copytree(artifact[0], tmp_path / "a")
    file = tmp_path / "a" / "manifest.json"
    manifest = json.loads(file.read_text())
    damage(manifest["interface"]["padding"])
    file.write_text(json.dumps({**manifest, SEAL_KEY: _compute_seal(manifest)}))
    with pytest.raises(ArtifactError):
        ts.load(tmp_path / "a")
