"""Bundles: one file with several targets and sizes, the same bytes each time; what is tampered with is refused."""

import json
import os
import struct
import zipfile

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import (
    ArgumentError,
    ArtifactError,
    DTypeError,
    FileError,
    ResourceError,
    ShapeError,
    TesseraError,
    UnknownNameError,
)
from tessera.runtime import bundle_files
from tessera.tools.cli.main import main

W = np.arange(12, dtype=np.float32).reshape(4, 3) / 7
META = {"version": "1.0", "requirements": {"memory": "1MB", "compute": "7.0"}}


@ts.jit
def layer(p, x):
    return ts.relu(x @ p["w"] - 1.0)


def rows(n):
    return np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)


def want(x):
    return np.maximum(x.astype(np.float64) @ W - 1.0, 0.0)


@pytest.fixture(scope="module")
def made():
    return ts.bundle(layer, {"w": W}, rows(2), targets=("llvm", "ptx"), batch_sizes=(1, 8), weights=("p",))


@pytest.fixture
def saved(made, tmp_path):
    return ts.save(made, tmp_path / "m.bundle", metadata=META)


def members(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def rewrite(path, content, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


def reseal(content, **fields):
    """The members with other fields in the index, sealed again as an attacker would."""
    index = {**json.loads(content["bundle.json"]), **fields}
    return {**content, "bundle.json": bundle_files.seal_json(index).encode()}


def test_a_call_takes_the_variant_of_its_sizes(saved):
    loaded = ts.load(saved)
    for n in (1, 8):
        np.testing.assert_allclose(loaded(rows(n)).numpy(), want(rows(n)), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(loaded(x=rows(n)).numpy(), loaded.run([rows(n)])[0])
    assert loaded.metadata == META and loaded.requirements == {"memory": "1MB", "compute": "7.0"}
    assert loaded.variants == {"llvm-b1": "llvm", "llvm-b8": "llvm", "ptx-b1": "ptx", "ptx-b8": "ptx"}
    assert repr(loaded) == "<bundle of layer for llvm: llvm-b1, llvm-b8>"
    with pytest.raises(ShapeError, match=r"not built for arguments of these shapes[\s\S]*llvm-b8: 8x4xf32"):
        loaded(rows(2))
    with pytest.raises(DTypeError):
        loaded(rows(8).astype(np.float64))
    with pytest.raises(ArgumentError, match="takes 1 array, received 2"):
        loaded(rows(1), rows(1))
    with pytest.raises(UnknownNameError, match="has no variant ptx-b1 for llvm"):
        loaded.load_variant("ptx-b1")


def test_another_target_of_the_same_file(saved):
    np.testing.assert_allclose(ts.load(saved, target="ptx")(rows(1)).numpy(), want(rows(1)), rtol=1e-5, atol=1e-6)
    with pytest.raises(ArtifactError, match="no variant for the target csl"):
        ts.load(saved, target="csl")


def test_only_code_for_the_named_target_is_loaded(saved, monkeypatch):
    """The PTX variants are not even read; those of llvm are compiled on the first call."""
    seen = []
    monkeypatch.setattr("tessera.runtime.bundles.load_artifact", lambda artifact, *_: seen.append(artifact) or 1 / 0)
    loaded = ts.load(saved)
    assert not seen
    with pytest.raises(ZeroDivisionError):
        loaded(rows(1))
    assert [a.manifest["target"] for a in seen] == ["llvm"]


def test_the_same_bytes_each_time(made, saved, tmp_path):
    again = ts.save(made, tmp_path / "again.bundle", metadata=dict(reversed(META.items())))
    assert again.read_bytes() == saved.read_bytes()
    held = members(saved)
    weights = [n for n in held if n.endswith("weights.safetensors")]
    assert len(weights) == 1  # four variants have the same weights
    assert min(held) == "bundle.json" and saved.stat().st_mode & 0o777 == 0o644


def test_symbolic_sizes(tmp_path):
    made = ts.bundle(layer, {"w": W}, rows(2), weights=("p",), dynamic={"x": {0: "B"}})
    loaded = ts.load(ts.save(made, tmp_path / "d.bundle"))
    for n in (1, 5, 8):
        np.testing.assert_allclose(loaded(rows(n)).numpy(), want(rows(n)), rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError):
        loaded(np.ones((2, 5), np.float32))
    with pytest.raises(ArgumentError, match="exclude each other"):
        ts.bundle(layer, {"w": W}, rows(2), weights=("p",), dynamic={"x": {0: "B"}}, batch_sizes=(1,))


def test_what_was_measured_is_stored(tmp_path):
    made = ts.bundle(layer, {"w": W}, rows(1), weights=("p",)).measure(0.01)
    found = ts.load(ts.save(made, tmp_path / "m.bundle")).performance["llvm"]
    assert found["median_ms"] > 0 and found["calls"] >= 3 and found["device"]


@pytest.mark.parametrize("sizes", [(0,), (-1,), (True,), ("8",), (2.0,)])
def test_wrong_batch_sizes(sizes):
    with pytest.raises(ArgumentError, match="a batch size is no positive integer"):
        ts.bundle(layer, {"w": W}, rows(2), weights=("p",), batch_sizes=sizes)


def test_what_cannot_be_a_bundle(tmp_path, made):
    with pytest.raises(ArgumentError, match="no argument has an axis"):
        ts.bundle(layer, {"w": W}, np.zeros((0, 4), np.float32), weights=("p",), batch_sizes=(1,))
    with pytest.raises(ArgumentError, match="targets is a list"):
        ts.bundle(layer, {"w": W}, rows(2), targets="llvm")
    with pytest.raises(ArgumentError, match="metadata is for bundles"):
        ts.save({"a": 1}, tmp_path / "x.safetensors", metadata={})
    for wrong in ({"a": float("nan")}, {"a": W}, {1: 2}, {"a": {"b": object()}}):
        with pytest.raises(ArgumentError, match="is not JSON data"):
            ts.save(made, tmp_path / "x.bundle", metadata=wrong)
    with pytest.raises(ArgumentError, match="do not go together"):
        made.join(made)
    assert not list(tmp_path.iterdir())


def test_memory_that_this_machine_lacks(made, tmp_path):
    path = ts.save(made, tmp_path / "m.bundle", metadata={"requirements": {"memory": "9000TB"}})
    with pytest.raises(ResourceError, match="requires 9,895,604,649,984,000 bytes"):
        ts.load(path)
    with pytest.raises(ResourceError):
        ts.load(ts.save(made, tmp_path / "n.bundle"), max_bytes=100)


def test_machine_code_of_a_file_that_others_may_write_is_compiled_anew(saved):
    assert ts.load(saved).load_variant("llvm-b1").artifact.is_owned("kernels.o")
    os.chmod(saved, 0o666)
    loaded = ts.load(saved)
    assert not loaded.load_variant("llvm-b1").artifact.is_owned("kernels.o")
    np.testing.assert_allclose(loaded(rows(1)).numpy(), want(rows(1)), rtol=1e-5, atol=1e-6)


# Files of others: every member is refused that is not as it was saved.


def test_every_member_is_checked(saved):
    content = members(saved)
    for name in content:
        changed = bytearray(content[name])
        changed[len(changed) // 2] ^= 1
        with pytest.raises(ArtifactError):  # of the index, of this target, and of the other one
            ts.load(rewrite(saved, {**content, name: bytes(changed)}))


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "variants/../../evil", "variants//x", "variants\\x", "x"])
def test_no_member_leads_elsewhere(saved, name):
    with pytest.raises(ArtifactError, match="not a complete bundle"):
        ts.load(rewrite(saved, {**members(saved), name: b"x"}))


def test_members_that_the_index_lacks_or_names_in_vain(saved):
    content = members(saved)
    with pytest.raises(ArtifactError, match="the index or the file lacks"):
        ts.load(rewrite(saved, {**content, "variants/x": b""}))
    del content["variants/llvm-b1/kernels.ll"]
    with pytest.raises(ArtifactError, match="the index or the file lacks"):
        ts.load(rewrite(saved, content))


def test_compressed_members_are_refused(saved):
    """So no small file expands to fill the memory."""
    bomb = {**members(saved), "variants/bomb": bytes(1 << 24)}
    with pytest.raises(ArtifactError, match="is compressed"):
        ts.load(rewrite(saved, bomb, zipfile.ZIP_DEFLATED))


def test_members_that_overlap(saved):
    """Two entries of the directory on the same bytes (Fifield 2019)."""
    data = bytearray(rewrite(saved, {f"variants/{c}": bytes(5000) for c in "ab"}).read_bytes())
    second = data.rindex(b"PK\x01\x02")
    data[second + 42 : second + 46] = struct.pack("<I", 0)
    data[second + 46 : second + 56] = b"variants/b"
    saved.write_bytes(bytes(data[: len(data) - 5000]))
    with pytest.raises(ArtifactError, match="not a complete bundle"):
        ts.load(saved)


def test_the_same_name_twice(saved):
    content = members(saved)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(saved, "w") as archive:
        for name, data in [*content.items(), ("bundle.json", b"{}")]:
            archive.writestr(name, data)
    with pytest.raises(ArtifactError, match="two members with the name"):
        ts.load(saved)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"schema": 2}, "schema 2, newer than this version"),
        ({"schema": "x"}, "is corrupt"),
        ({"oldest_reader": "99.1"}, "needs a newer version of Tessera"),
        ({"kind": "program"}, "no valid `kind`"),
        ({"variants": {}}, "has no variants"),
        ({"variants": {"../x": {"target": "llvm", "files": {}, "performance": {}}}}, "not a name of a variant"),
        ({"variants": {"x": {"target": "llvm", "files": {}, "performance": {}}}}, "without manifest.json"),
        ({"variants": {"x": {"target": "llvm", "files": {"manifest.json": "y"}, "performance": {}}}}, "without y"),
        ({"requirements": {"memory": -1}}, "no valid `requirements`"),
        ({"members": []}, "no valid `members`"),
    ],
)
def test_indices_of_others(saved, fields, says):
    with pytest.raises(ArtifactError, match=says):
        ts.load(rewrite(saved, reseal(members(saved), **fields)))


def test_a_variant_of_another_target_than_the_index_says(saved):
    index = json.loads(members(saved)["bundle.json"])
    index["variants"]["ptx-b1"]["target"] = "llvm"
    with pytest.raises(ArtifactError, match="the manifest of the variant ptx-b1 is not that of its files"):
        ts.load(rewrite(saved, reseal(members(saved), variants=index["variants"])))


def test_truncated_files(saved, tmp_path):
    whole = saved.read_bytes()
    for end in (0, 3, 30, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:end])
        with pytest.raises(TesseraError):
            ts.load(saved)
    for name, error in (("no.bundle", FileError), ("", ArtifactError)):
        with pytest.raises(error):
            ts.load(tmp_path / name)


@pytest.mark.parametrize("metadata", [3, "x", {"requirements": {"memory": "much"}}, {"a": {1: 2}}])
def test_metadata_that_no_reader_takes_is_not_written(made, tmp_path, metadata):
    with pytest.raises(ArgumentError):
        ts.save(made, tmp_path / "a.bundle", metadata=metadata)
    assert not (tmp_path / "a.bundle").exists()


@pytest.mark.parametrize("named", [
    {"targets": 3}, {"targets": [3]}, {"targets": b"llvm"}, {"weights": None}, {"weights": [1]}, {"batch_sizes": 3},
    {"batch_sizes": b"q"}, {"batch_sizes": [np.ones(2)]},
])  # fmt: skip
def test_arguments_of_other_types(named):
    with pytest.raises(ArgumentError):
        ts.bundle(ts.jit(lambda x: x + 1), np.ones((1, 2), np.float32), **{"batch_sizes": [1], **named})


@pytest.mark.parametrize("path", [3, None, b"a.bundle", "a\0b", "x" * 300])
def test_what_is_no_path(made, path):
    with pytest.raises((ArgumentError, FileError)):
        ts.save(made, path)
    with pytest.raises((ArgumentError, FileError)):
        ts.load(path)


def test_a_target_and_a_time_of_other_types(made, saved):
    with pytest.raises(ArgumentError, match="no text"):
        ts.load(saved, target=3)
    with pytest.raises(ArgumentError, match="time to measure"):
        made.measure(seconds="long")


def test_a_write_that_fails_leaves_the_old_file(made, saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr(zipfile.ZipFile, "writestr", lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
    with pytest.raises(FileError, match="cannot be written"):
        ts.save(made, saved)
    assert saved.read_bytes() == before and [p.name for p in saved.parent.iterdir()] == ["m.bundle"]


# Commands.

PROGRAM = """
import numpy as np
import tessera as ts

@ts.example(lambda rng: (np.ones((4, 3), np.float32), rng.standard_normal((2, 4)).astype(np.float32)), weights=("w",))
@ts.jit
def f(w, x):
    return x @ w
"""


def test_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.py").write_text(PROGRAM)
    (tmp_path / "meta.json").write_text('{"version": "2"}')
    sizes = ["--batch-size", "1", "--batch-size", "4", "--metadata", "meta.json", "--measure"]
    assert main(["build", "f.py", "-o", "f.bundle", *sizes]) == 0
    np.save("x.npy", rows(4))
    assert main(["run", "f.bundle", "--input", "x.npy", "--output", "y.npy"]) == 0
    np.testing.assert_allclose(np.load("y.npy"), rows(4) @ np.ones((4, 3)), rtol=1e-5, atol=1e-6)
    assert main(["inspect", "f.bundle"]) == 0
    shown = capsys.readouterr().out
    assert "llvm-b4" in shown and '"version": "2"' in shown and " ms" in shown
    assert main(["inspect", "f.bundle", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entry"] == "f"
    assert main(["build", "f.py", "-o", "folder", "--batch-size", "1"]) == 2
    assert "--batch-size is for a bundle" in capsys.readouterr().err
    assert main(["run", "f.bundle", "--level", "graph"]) == 2


def test_the_batch_is_that_of_the_first_argument():
    """In the order of the call, whatever the names: `a` is a matrix here, and has no batch."""

    @ts.jit
    def layer(x, a):
        return x @ a

    made = ts.bundle(layer, np.ones((4, 3), np.float32), np.ones((3, 2), np.float32), batch_sizes=(1, 8))
    shapes = [[p["shape"] for p in v.manifest["interface"]["parameters"]] for v in made.variants.values()]
    assert shapes == [[[1, 3], [3, 2]], [[8, 3], [3, 2]]]
