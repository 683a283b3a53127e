"""Artifacts on disk, the registry, and what the text promises: the same bytes, source lines, named errors."""

import json
from importlib.metadata import EntryPoint

import numpy as np
import pytest
from test_matmul import matmul
from tilekernels import Kernel

from tessera.codegen import artifact, contract
from tessera.codegen.artifact import Artifact
from tessera.codegen.contract import Backend, check_element_types
from tessera.codegen.llvm import BACKEND
from tessera.core.errors import ArgumentError, ArtifactError, Location, UnknownNameError, UnsupportedOpError
from tessera.core.types import DTYPES, f32, int4, int64
from tessera.ops.tensor import basic, contractions, shape
from tessera.ops.tensor import elementwise as e


def doubled():
    x = np.arange(40, dtype=np.float32)
    k = Kernel(x)
    k.b.location = Location("/user/model.py", 31, 5)
    block = k.load(k.params[0])
    k.b.location = Location("/user/model.py", 32, 9)
    k.store(k.params[0], k.add(block, block))
    return k.module(), x


def test_the_same_input_gives_the_same_bytes(tmp_path):
    one, other = (BACKEND.emit(matmul(33, 40, 50, 16, 16, 16)[0], {}).save(tmp_path / n) for n in "ab")
    for file in one.iterdir():
        assert file.read_bytes() == (other / file.name).read_bytes()


def test_saved_and_read_it_still_runs(tmp_path):
    module, x = doubled()
    read = artifact.read_artifact(BACKEND.emit(module, {}).save(tmp_path / "a"))
    BACKEND.runtime(read).run([x])
    np.testing.assert_array_equal(x, 2 * np.arange(40))


def test_saving_replaces_an_artifact_and_nothing_else(tmp_path):
    made = Artifact({"kind": "program"}, {"sub/x.txt": "1"})
    made.save(tmp_path / "a")
    Artifact({"kind": "program"}, {"y.txt": "2"}).save(tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["manifest.json", "y.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    (tmp_path / "b").mkdir()
    with pytest.raises(ArtifactError, match="is not an artifact"):
        made.save(tmp_path / "b")


@pytest.mark.parametrize(
    "name", ["../x", "a/../x", "/x", "manifest.json", "./manifest.json", ".", "", "a\nb", "a\x1b[2J"]
)
def test_file_names_stay_inside(tmp_path, name):
    with pytest.raises(ArtifactError, match="not a valid file name"):
        Artifact({}, {name: ""}).save(tmp_path / "a")
    assert not list(tmp_path.iterdir())


def spoil_json(folder):
    (folder / "manifest.json").write_text("{")


def spoil_file(folder):
    (folder / "x.txt").write_text("2")


def spoil_schema(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "schema": 99}))


SPOILT = [
    (spoil_json, "corrupt"),
    (spoil_file, "has changed since it was built"),
    (spoil_schema, "schema 99, newer"),
    (lambda folder: (folder / "x.txt").unlink(), "lacks x.txt"),
    (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
]


@pytest.mark.parametrize(("spoil", "text"), SPOILT)
def test_a_damaged_folder_is_refused(tmp_path, spoil, text):
    folder = Artifact({"kind": "program"}, {"x.txt": "1"}).save(tmp_path / "a")
    spoil(folder)
    with pytest.raises(ArtifactError, match=text):
        artifact.read_artifact(folder)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="no folder"):
        artifact.read_artifact(tmp_path / "none")


def test_the_registry():
    assert contract.get_backend("llvm") is BACKEND
    assert isinstance(BACKEND, Backend)
    assert f32 in BACKEND.capabilities.dtypes
    with pytest.raises(UnknownNameError, match=r"(?s)nvptx.*llvm"):
        contract.get_backend("nvptx")


def test_a_generator_from_elsewhere(monkeypatch):
    point = EntryPoint("mine", "tessera.codegen.llvm:BACKEND", contract.ENTRY_POINT_GROUP)
    monkeypatch.setattr(contract, "entry_points", lambda group: [point])
    assert contract.get_backend("mine") is BACKEND
    contract.get_backend.cache_clear()


def test_lines_name_their_source():
    text = BACKEND.emit(doubled()[0], {}).text("kernels.ll")
    add = next(line for line in text.splitlines() if " fadd " in line)
    node = add.rpartition("!dbg ")[2]
    assert f"{node} = !DILocation(line: 32, column: 9" in text and 'filename: "model.py"' in text
    assert "!dbg" not in BACKEND.emit(doubled()[0], {"debug": False}).text("kernels.ll")


def test_an_op_with_no_emission_is_named_with_its_place():
    k = Kernel(np.zeros(4, np.float32))
    k.b.location = Location("/user/model.py", 7, 1)
    k(shape.pad, k.load(k.params[0]), low=(1,), high=(1,))
    with pytest.raises(UnsupportedOpError, match=r"model\.py:7:1.*llvm.*ts\.pad"):
        BACKEND.emit(k.module(), {})


def test_an_element_type_the_target_lacks_is_named():
    k = Kernel(np.zeros(4, np.float32))
    k.store(k.params[0], k(basic.cast, k(basic.cast, k.load(k.params[0]), dtype=int4), dtype=f32))
    with pytest.raises(UnsupportedOpError, match="the target small has no element type int4"):
        check_element_types(k.module(), "small", (f32, int64))
    assert set(BACKEND.capabilities.dtypes) == set(DTYPES)  # llvm lacks none


def test_unknown_options_are_refused():
    with pytest.raises(ArgumentError, match="fast"):
        BACKEND.emit(doubled()[0], {"fast": True})


def test_every_op_of_the_tile_level_is_emitted():
    assert BACKEND.coverage.list_missing() == []
    assert all(op.name.startswith("mesh.") for op in BACKEND.coverage.refused)


def test_a_dot_of_two_kinds_shares_nothing_it_should_not():
    a = np.ones((20, 20), np.float32)
    k = Kernel(a, a)
    x = k.load(k.params[0])
    once = k(contractions.dot, x, x, dtype=f32)
    k.store(k.params[1], k(contractions.dot, once, k(e.mul, once, x), dtype=f32))
    out = a.copy()
    BACKEND.runtime(BACKEND.emit(k.module(), {})).run([a, out])
    np.testing.assert_allclose(out, (a @ a) @ ((a @ a) * a))
