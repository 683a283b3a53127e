"""Sharded checkpoints: written by one mesh and read by another, whole or not at all; damaged files are refused."""

import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera.dist import P, load_checkpoint, save_checkpoint, save_checkpoint_async
from tessera.errors import ArgumentError, FileError, ShapeError

WHOLE = {
    "w": ts.Tensor(np.arange(48.0).reshape(8, 6).astype("f4")),
    "blocks": [{"b": ts.Tensor(np.arange(8), dtype=ts.int32)}, {"b": ts.Tensor(np.linspace(0, 1, 8)).to(ts.bf16)}],
    "step": ts.Tensor(7),
    "empty": ts.zeros((0, 3)),
    "small": ts.Tensor([1.0, -2.0, 0.5, 3.0]).to(ts.fp8_e4m3),
}
SPECS = {
    "w": P("a", "b"),
    "blocks": [{"b": P("b")}, {"b": P(("a", "b"))}],
    "step": None,
    "empty": None,
    "small": P("a"),
}


def cut(value, spec):
    if isinstance(value, dict):
        return {k: cut(v, spec[k]) for k, v in value.items()}
    if isinstance(value, list):
        return [cut(v, s) for v, s in zip(value, spec, strict=True)]
    return value if spec is None else ts.shard(value, spec=spec)


def write(folder, shape=(2, 2), whole=WHOLE):
    ts.spmd(lambda: save_checkpoint(folder, cut(whole, SPECS), SPECS), mesh=ts.Mesh(shape, ("a", "b")))()


def check_equal(found, wanted):
    from tessera.core.pytree import flatten

    for (name, a), (_, b) in zip(flatten(found)[0], flatten(wanted)[0], strict=True):
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=name)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 2), (1, 1)])
def test_read_on_another_mesh(tmp_path, shape):
    write(tmp_path / "c")
    check_equal(load_checkpoint(tmp_path / "c", WHOLE), WHOLE)
    mesh = ts.Mesh(shape, ("a", "b"))

    def program():
        check_equal(load_checkpoint(tmp_path / "c", WHOLE, SPECS), cut(WHOLE, SPECS))

    ts.spmd(program, mesh=mesh)()


def test_only_the_first_of_equal_parts_is_written(tmp_path):
    write(tmp_path / "c")
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    assert [p["rank"] for p in manifest["tensors"]["step"]["parts"]] == [0]
    assert [p["rank"] for p in manifest["tensors"]["blocks.0.b"]["parts"]] == [0, 1]
    assert manifest["mesh"] == {"a": 2, "b": 2}


def test_a_checkpoint_is_replaced_whole(tmp_path, monkeypatch):
    write(tmp_path / "c")
    other = {**WHOLE, "step": ts.Tensor(8)}

    def fail(*args, **named):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("tessera.dist.checkpoints.write_manifest", fail)
        with pytest.raises(FileError, match="disk full"):
            write(tmp_path / "c", whole=other)
    assert load_checkpoint(tmp_path / "c", WHOLE)["step"].item() == 7
    move = os.replace

    def fail_to_move(source, target):
        if str(source).endswith(".partial"):
            assert not Path(target).exists()  # the older one was moved aside, not deleted
            fail()
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("tessera.dist.checkpoints.exchange_folders", lambda a, b: False)  # a file system without
        patch.setattr("tessera.dist.checkpoints.os.replace", fail_to_move)
        with pytest.raises(FileError, match="disk full"):
            write(tmp_path / "c", whole=other)
    assert load_checkpoint(tmp_path / "c", WHOLE)["step"].item() == 7
    write(tmp_path / "c", whole=other)
    assert load_checkpoint(tmp_path / "c", WHOLE)["step"].item() == 8
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_an_older_checkpoint_is_never_away(tmp_path, monkeypatch):
    """Where the system exchanges two folders, none is moved aside: a kill at any moment leaves a whole one."""
    write(tmp_path / "c")
    monkeypatch.setattr("tessera.dist.checkpoints.os.replace", _move_files_alone)
    write(tmp_path / "c", whole={**WHOLE, "step": ts.Tensor(8)})
    assert load_checkpoint(tmp_path / "c", WHOLE)["step"].item() == 8
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def _move_files_alone(source, target, move=os.replace):
    assert not Path(source).is_dir()
    move(source, target)


def test_damaged_checkpoints(tmp_path):
    write(tmp_path / "c")
    with pytest.raises(FileError, match="no tensor other"):
        load_checkpoint(tmp_path / "c", {"other": 0})
    with pytest.raises(FileError, match="there is no checkpoint"):
        load_checkpoint(tmp_path / "none", WHOLE)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    manifest["tensors"]["w"]["parts"].pop()
    (tmp_path / "c" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(FileError, match="has 36 of 48 elements of w"):
        load_checkpoint(tmp_path / "c", WHOLE)
    shard = tmp_path / "c" / "rank-00001.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(FileError, match="rank-00001.safetensors .* is damaged"):
        load_checkpoint(tmp_path / "c", WHOLE)
    shard.unlink()
    with pytest.raises(FileError, match="lacks rank-00001"):
        load_checkpoint(tmp_path / "c", WHOLE)
    for text in ("{", "[]", '{"version": 1}'):
        (tmp_path / "c" / "manifest.json").write_text(text)
        with pytest.raises(FileError, match="manifest .* is damaged"):
            load_checkpoint(tmp_path / "c", WHOLE)
    (tmp_path / "c" / "manifest.json").write_text('{"version": 9, "files": {}, "tensors": {}}')
    with pytest.raises(FileError, match="version 9"):
        load_checkpoint(tmp_path / "c", WHOLE)


def test_calls_that_do_not_fit(tmp_path):
    with pytest.raises(ArgumentError, match="not one of them"):
        save_checkpoint(tmp_path / "c", WHOLE)
    write(tmp_path / "c")
    three = ts.Mesh((3, 1), ("a", "b"))
    with pytest.raises(ShapeError, match="no 3 equal parts"):
        ts.spmd(lambda: load_checkpoint(tmp_path / "c", {"w": 0}, {"w": P("a")}), mesh=three)()


# Saved while training goes on.


def test_save_while_training_goes_on(tmp_path):
    """What is saved are the values at the call; the folder before stays until the new one is complete."""
    write(tmp_path / "c", whole={**WHOLE, "step": ts.Tensor(1)})

    def program():
        params = cut(WHOLE, SPECS)
        params["w"] = ts.Tensor(params["w"].numpy().copy())
        saving = save_checkpoint_async(tmp_path / "c", params, SPECS)
        params["w"].numpy()[...] = 0.0  # training writes in place
        saving.wait()
        saving.wait()
        assert saving.done()

    ts.spmd(program, mesh=ts.Mesh((2, 2), ("a", "b")))()
    check_equal(load_checkpoint(tmp_path / "c", WHOLE), WHOLE)
    mesh = ts.Mesh((4, 1), ("a", "b"))
    ts.spmd(lambda: check_equal(load_checkpoint(tmp_path / "c", WHOLE, SPECS), cut(WHOLE, SPECS)), mesh=mesh)()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_saves_follow_each_other(tmp_path):
    def program():
        for step in range(3):
            saving = save_checkpoint_async(tmp_path / "c", {"step": ts.Tensor(step)})
        saving.wait()

    ts.spmd(program, mesh=ts.Mesh(2))()
    assert load_checkpoint(tmp_path / "c", {"step": 0})["step"].item() == 2


def test_a_save_that_is_not_waited_for(tmp_path):
    ts.spmd(lambda: save_checkpoint_async(tmp_path / "c", WHOLE, None) and None, mesh=ts.Mesh(2))()
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):
            thread.join(30)
    check_equal(load_checkpoint(tmp_path / "c", WHOLE), WHOLE)


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    write(tmp_path / "c")

    def fail(folder, leaves, mesh, rank):
        if rank == 1:
            raise OSError("no space left")
        write_parts(folder, leaves, mesh, rank)

    module = sys.modules["tessera.dist.background_saves"]
    write_parts = module.write_parts
    monkeypatch.setattr(module, "write_parts", fail)
    seen = {}

    def program():
        saving = save_checkpoint_async(tmp_path / "c", {"w": ts.ones((3,))})
        with pytest.raises(FileError) as caught:
            saving.wait()
        seen[ts.get_rank()] = caught.value.message

    ts.spmd(program, mesh=ts.Mesh(3))()
    assert "no space left" in seen[1] and "did not write its part" in seen[0] and "another rank" in seen[2]
    check_equal(load_checkpoint(tmp_path / "c", WHOLE), WHOLE)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot make the folder"):
        ts.spmd(lambda: save_checkpoint_async(tmp_path / "file" / "c", WHOLE), mesh=ts.Mesh(2))()
