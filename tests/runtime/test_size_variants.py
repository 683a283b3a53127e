"""Size variants: one artifact with several programs, of which each call runs the one for its sizes."""

import json

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, ArtifactError, ShapeError
from tessera.tools.cli.main import main


def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def factor(n):
    """What the program below multiplies by at n rows, in plain Python."""
    found = 2.0 if n % 2 else 1.0
    return 50.0 if n == 16 else found * (10.0 if n > 100 else 1.0)


@ts.jit
@ts.require("B <= 300")
def scaled_sum(x: ts.Tensor["B", 8], w):
    n = x.shape[0]
    k = 1.0
    if n % 2:
        k = 2.0
    if n > 100:
        k = k * 10.0
    if n == 16:
        k = 50.0
    return ts.sum(x * k + w, axis=0)


WANTED = ("B % 64 == 0", "B == 1", "B <= 4")


@pytest.fixture(scope="module", params=["llvm", "ptx"])
def artifact(request, tmp_path_factory):
    out = tmp_path_factory.mktemp(request.param) / "a"
    w = draw(8)
    ts.build(scaled_sum, draw(10, 8), w, out=out, target=request.param, dynamic=True, weights=["w"], variants=WANTED)
    return out, ts.load(out)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 10, 16, 17, 64, 101, 102, 128, 192, 299, 300])
def test_every_call_has_its_own_branch(artifact, rows):
    x = draw(rows, 8)
    want = (x.astype(np.float64) * factor(rows) + draw(8)).sum(axis=0)
    np.testing.assert_allclose(artifact[1](x).numpy(), want, rtol=1e-4, atol=1e-3)


def test_a_call_runs_the_variant_for_its_sizes(artifact):
    program = artifact[1]

    def chosen(rows):
        found = program.choose([(rows, 8)])
        return next((v.when[0].text for v in program.variants if v.program is found), "general")

    assert [chosen(n) for n in (64, 1, 2, 10, 16)] == ["B % 64 == 0", "B == 1", "B <= 4", "general", "B == 16"]
    for rows in (0, 301):
        with pytest.raises(ShapeError):
            program(draw(rows, 8))
    with pytest.raises(ShapeError, match="axis 1"):
        program(draw(4, 9))


def test_a_divisor_leaves_whole_tiles_and_a_value_no_symbols(artifact):
    folder = artifact[0]
    assert 'edge = "clip"' in (folder / "tile.mlir").read_text()
    assert 'edge = "clip"' not in (folder / "variant1" / "tile.mlir").read_text()
    assert "dims" not in (folder / "variant2" / "tile.mlir").read_text()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert [v["when"][0] for v in manifest["variants"]][:3] == list(WANTED)


def test_weights_are_stored_once(artifact):
    size = (artifact[0] / "weights.safetensors").stat().st_size
    assert size < 2 * draw(8).nbytes + 200


def test_inspect_lists_them(artifact, capsys):
    assert main(["inspect", str(artifact[0])]) == 0
    out = capsys.readouterr().out
    assert "x: Bx8xf32" in out and "w: 8xf32, stored" in out
    assert "requires B <= 300, as " in out and "variant 2, for B == 1" in out
    assert main(["inspect", str(artifact[0]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["variants"][1] == ["B == 1"]


def test_the_same_build_gives_the_same_bytes(tmp_path):
    for name in "ab":
        ts.build(scaled_sum, draw(10, 8), draw(8), out=tmp_path / name, dynamic=True, variants=["B == 1"])
    files = [sorted(p.relative_to(tmp_path / n) for p in (tmp_path / n).rglob("*") if p.is_file()) for n in "ab"]
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@ts.kernel
def scale(x: ts.Tensor["N"], out: ts.Tensor["N"], *, BM: int = 16):
    i = tile.program_id(0) * BM
    k = 3.0 if x.shape[0] % 3 == 1 else 2.0
    tile.store(out[i : i + BM], tile.load(x[i : i + BM], edge="clip") * k, edge="clip")


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_kernels_have_variants(tmp_path, target):
    entry = scale[lambda c: (tile.cdiv(c["N"], c["BM"]),)]
    ts.build(
        entry, draw(9), draw(9), out=tmp_path / "a", target=target, dynamic=True, variants=["N == 5", "N % 16 == 0"]
    )
    program = ts.load(tmp_path / "a")
    for n in (1, 4, 5, 6, 16, 17, 48, 64):
        x, out = draw(n), np.zeros(n, np.float32)
        program(x, out)
        np.testing.assert_array_equal(out, x * np.float32(3.0 if n % 3 == 1 else 2.0))


def test_sizes_for_which_the_code_fails_stay_refused(tmp_path):
    table = draw(20, 4)

    @ts.jit
    def f(x):
        n = x.shape[0]
        if n % 5 == 4:
            raise ValueError("not these")
        return x + ts.Tensor(table)[:n]

    ts.build(f, draw(8, 4), out=tmp_path / "a", dynamic={"x": {0: "N"}})
    program = ts.load(tmp_path / "a")
    np.testing.assert_array_equal(program(draw(20, 4)).numpy(), draw(20, 4) + table)
    for n, text in ((9, "N % 5 != 4"), (21, "N <= 20")):
        with pytest.raises(ShapeError, match=f"{text} does not hold"):
            program(draw(n, 4))


@pytest.mark.parametrize(
    ("variants", "dynamic", "text"),
    [
        (["Q == 1"], True, "names no symbolic size"),
        (["B > 300"], True, "no sizes fulfil"),
        (["B == 1"], None, "variants are for symbolic sizes"),
        ([3], True, "is not a variant"),
        (["B == 1"] * 9, True, "9 variants"),
    ],
)
def test_wrong_variants_are_said(tmp_path, variants, dynamic, text):
    with pytest.raises(ArgumentError, match=text):
        ts.build(scaled_sum, draw(10, 8), draw(8), out=tmp_path / "a", dynamic=dynamic, variants=variants)


def test_a_constraint_that_is_none(tmp_path):
    with pytest.raises(ShapeError, match="is not a constraint"):
        ts.build(scaled_sum, draw(10, 8), draw(8), out=tmp_path / "a", dynamic=True, variants=["B"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: v[0].update(when=["__import__('os')"]),
        lambda v: v[0].update(when=3),
        lambda v: v[0].update(place="nowhere"),
        lambda v: v[0]["manifest"].pop("plan"),
        lambda v: v[0]["manifest"]["interface"].update(parameters=[]),
        lambda v: v[0].update(weights={"w": "other"}),
        lambda v: v.append(3),
    ],
)
def test_damaged_variants_are_refused(artifact, tmp_path, damage):
    import shutil

    from tessera.codegen.artifact import SEAL_KEY, _compute_seal

    shutil.copytree(artifact[0], tmp_path / "a")
    file = tmp_path / "a" / "manifest.json"
    manifest = json.loads(file.read_text())
    damage(manifest["variants"])
    file.write_text(json.dumps({**manifest, SEAL_KEY: _compute_seal(manifest)}))
    with pytest.raises(ArtifactError):
        ts.load(tmp_path / "a")(draw(64, 8))


def test_on_the_command_line(tmp_path, capsys):
    options = ["--dynamic", "--variant", "M == 1", "-o", str(tmp_path / "a")]
    assert main(["build", "examples/matmul.py", *options]) == 0
    assert main(["inspect", str(tmp_path / "a")]) == 0
    assert "variant 1, for M == 1" in capsys.readouterr().out
    assert main(["build", "examples/matmul.py", *options[:-1], str(tmp_path / "a.bundle")]) == 2
    assert "--variant is for an artifact" in capsys.readouterr().err
