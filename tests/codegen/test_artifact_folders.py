"""Artifact folders: builders at once, kills, links, and manifests that were edited and sealed again."""

import contextlib
import copy
import json
import os
import shutil
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.codegen import artifact
from tessera.codegen.artifact import Artifact, read_artifact
from tessera.core.errors import ArtifactError, ResourceError, TesseraError

ONE, TWO = (Artifact({"kind": "program"}, {f"{n}.txt": n * 1000, "sub/x.txt": n}) for n in "ab")


def stop(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("exchange", [True, False])
def test_a_kill_at_any_moment_leaves_a_whole_artifact(tmp_path, monkeypatch, exchange):
    """Each call that changes the folder is the last one in turn."""
    if not exchange:
        monkeypatch.setattr(artifact, "exchange_folders", lambda *_: False)
    for name in ("exchange_folders", "_move_aside", "_replace_folder"):
        ONE.save(tmp_path / "a")
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(artifact, name, stop)
            TWO.save(tmp_path / "a")
        assert sorted(read_artifact(tmp_path / "a").files)[0] in ("a.txt", "b.txt")
    TWO.save(tmp_path / "a")
    assert sorted(read_artifact(tmp_path / "a").files) == ["b.txt", "sub/x.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_kill_between_two_renames_is_mended_by_the_next_reader(tmp_path):
    ONE.save(tmp_path / "a")
    (tmp_path / ".a.tessera-x").mkdir()
    (tmp_path / "a").rename(tmp_path / ".a.tessera-x" / "artifact")
    assert "a.txt" in read_artifact(tmp_path / "a").files


@pytest.mark.parametrize("exchange", [True, False])
def test_builders_and_readers_of_one_folder(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(artifact, "exchange_folders", lambda *_: False)
    ONE.save(tmp_path / "a")
    wrong, seen = [], set()

    def repeat(work):
        try:
            for _ in range(40):
                work()
        except Exception as error:
            wrong.append(error)

    works = [lambda: ONE.save(tmp_path / "a"), lambda: TWO.save(tmp_path / "a")]
    works += [lambda: seen.add(min(read_artifact(tmp_path / "a").files))] if exchange else []
    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and seen <= {"a.txt", "b.txt"}
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_links_are_not_followed(tmp_path):
    folder = ONE.save(tmp_path / "a")
    (folder / "a.txt").rename(tmp_path / "outside.txt")
    (folder / "a.txt").symlink_to(tmp_path / "outside.txt")
    with pytest.raises(ArtifactError, match=r"a\.txt is a link"):
        read_artifact(folder)
    (folder / "a.txt").unlink()
    (tmp_path / "outside.txt").rename(folder / "a.txt")
    (folder / "sub").rename(tmp_path / "outside")
    (folder / "sub").symlink_to(tmp_path / "outside")
    with pytest.raises(ArtifactError, match=r"sub/x\.txt is a link"):
        read_artifact(folder)


def test_a_builder_leaves_the_folders_of_those_at_work(tmp_path):
    for name, age in (("at-work", 0), ("killed", 2 * artifact.STALE_SECONDS)):
        (tmp_path / f".a.tessera-{name}").mkdir()
        os.utime(tmp_path / f".a.tessera-{name}", (time.time() - age,) * 2)
    ONE.save(tmp_path / "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.tessera-at-work", "a"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """An artifact of a program with a loop, a workspace and stored weights."""
    x = np.ones((8, 8), "f4")
    f = ts.jit(lambda x, w: (ts.sum(x @ w, axis=1), ts.sort(x, axis=1)))
    return ts.build(f, x, x, out=tmp_path_factory.mktemp("built") / "a", weights=("w",))


def reseal(folder, manifest):
    manifest = {k: v for k, v in manifest.items() if k != artifact.SEAL_KEY}
    sealed = {**manifest, artifact.SEAL_KEY: artifact._compute_seal(manifest)}
    (folder / artifact.MANIFEST).write_text(json.dumps(sealed))


def list_places(data, place=()):
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place, *(found for key, value in items for found in list_places(value, (*place, key)))]


ODD_VALUES = (None, -1, 0, 3, 2**45, 2**64, 10**30, 1.5, "", "f64", "\ud800", [], {}, [[0]], True, float("inf"))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_an_edited_manifest_is_refused_or_runs(built, data):
    """Whoever edits a manifest can seal it again: the error is typed, and machine code never gets another plan."""
    text = (built / artifact.MANIFEST).read_text()
    manifest = json.loads(text)
    places = [p for p in list_places(manifest) if p and p[0] not in ("files", "hashes", artifact.SEAL_KEY)]
    *way, last = data.draw(st.sampled_from(places))
    parent = manifest
    for key in way:
        parent = parent[key]
    parent[last] = copy.deepcopy(data.draw(st.sampled_from(ODD_VALUES)))
    reseal(built, manifest)
    try:
        loaded = ts.load(built)
        loaded.run([np.ones(p["shape"], "f4") for p in loaded.parameters])
    except TesseraError:
        pass
    finally:
        (built / artifact.MANIFEST).write_text(text)


def test_a_result_that_is_no_parameter_is_refused(built):
    text = (built / artifact.MANIFEST).read_text()
    manifest = json.loads(text)
    manifest["interface"]["written"] = [len(manifest["interface"]["parameters"])]
    reseal(built, manifest)
    try:
        with pytest.raises(ArtifactError, match="the interface in the manifest is not valid"):
            ts.load(built)
    finally:
        (built / artifact.MANIFEST).write_text(text)


@pytest.mark.parametrize(("field", "value", "says"), [("workspace", 2**45, "bytes of memory"), ("grid", 2**31, "prog")])
def test_a_loader_states_its_limits(built, field, value, says):
    text = (built / artifact.MANIFEST).read_text()
    manifest = json.loads(text)
    plan = manifest["plan"]
    if field == "grid":
        plan["launches"][0]["grid"][0] = value
    else:
        plan[field] = value
    reseal(built, manifest)
    try:
        with pytest.raises(ResourceError, match=rf"(?s)asks for .* {says}.*at most"):
            ts.load(built)
    finally:
        (built / artifact.MANIFEST).write_text(text)
    with pytest.raises(ResourceError, match="at most 1"):
        ts.load(built, max_bytes=1)


@pytest.mark.parametrize("value", [True, False, -1, 2**62 + 1, 1.0, "1"])
@pytest.mark.parametrize("field", ["written", "shape"])
def test_a_count_is_a_whole_number_that_64_bits_hold(built, field, value):
    """To Python a bool is a number, and True would be the second parameter, or one element."""
    text = (built / artifact.MANIFEST).read_text()
    manifest = json.loads(text)
    if field == "written":
        manifest["interface"]["written"] = [value]
    else:
        manifest["interface"]["parameters"][0]["shape"][0] = value
    reseal(built, manifest)
    try:
        with pytest.raises(ArtifactError, match="has no valid `interface`"):
            ts.load(built)
    finally:
        (built / artifact.MANIFEST).write_text(text)


@pytest.mark.parametrize("outputs", [3, [3], [{}], [{"name": "o", "dtype": "f32", "shape": 3}]])
def test_a_server_reads_the_signature(built, outputs):
    text = (built / artifact.MANIFEST).read_text()
    manifest = json.loads(text)
    manifest["signature"]["outputs"] = outputs
    reseal(built, manifest)
    try:
        with pytest.raises(ArtifactError, match="has no valid `signature`"):
            ts.load(built)
    finally:
        (built / artifact.MANIFEST).write_text(text)


@pytest.mark.parametrize("name", ["../outside.txt", "sub/../../outside.txt", "/etc/hostname", "a\nb"])
def test_a_manifest_names_no_file_outside(tmp_path, name):
    """The hash is right, and the manifest sealed: the name alone is refused, before anything is read."""
    folder = ONE.save(tmp_path / "a")
    (tmp_path / "outside.txt").write_text("a secret")
    manifest = json.loads((folder / artifact.MANIFEST).read_text())
    manifest["files"][name] = artifact.hash_content("a secret")
    reseal(folder, manifest)
    with pytest.raises(ArtifactError, match="is not a valid file name in an artifact"):
        read_artifact(folder)


RANDOM_EDITS = {
    "no state": lambda face: face["parameters"].__delitem__(slice(-2, None)),
    "half a state": lambda face: face["parameters"].pop(),
    "a state not drawn": lambda face: face["random"].update(drawn=False),
    "drawn is a number": lambda face: face["random"].update(drawn=1),
    "a seed of another kind": lambda face: face["random"].update(seed=1.5),
    "a bool as seed": lambda face: face["random"].update(seed=True),
    "a bool as count": lambda face: face["random"].update(count=True),
    "a negative count": lambda face: face["random"].update(count=-1),
    "another field": lambda face: face["random"].update(offset=3),
    "a field less": lambda face: face["random"].pop("seed"),
    "no description": lambda face: face.update(random=None),
}


@pytest.fixture(scope="module")
def drawing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("drawing") / "a"
    return ts.build(ts.jit(lambda x: x + ts.rand(x.shape)), np.ones(4, "f4"), out=folder)


@pytest.mark.parametrize("edit", RANDOM_EDITS)
def test_an_edited_use_of_the_generator_is_refused(drawing, tmp_path, edit):
    folder = shutil.copytree(drawing, tmp_path / "a")
    manifest = json.loads((folder / artifact.MANIFEST).read_text())
    names = [p["name"] for p in manifest["interface"]["parameters"]]
    assert names[-2:] == ["random_seed", "random_offset"] and ts.load(folder)(np.ones(4, "f4")).shape == (4,)
    RANDOM_EDITS[edit](manifest["interface"])
    reseal(folder, manifest)
    with pytest.raises(ArtifactError, match="the interface in the manifest is not valid"):
        ts.load(folder)
