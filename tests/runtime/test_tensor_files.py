"""Tensor files: every element type and container comes back, and broken files are typed errors."""

from collections import namedtuple

import numpy as np
import pytest

import tessera as ts
from tessera import nn
from tessera.errors import ArgumentError, FileError

Pair = namedtuple("Pair", "a b")
TYPES = [
    ts.f32, ts.f16, ts.bf16, ts.f64, ts.fp8_e4m3, ts.fp8_e5m2, ts.fp6, ts.fp6_e2m3, ts.fp4, ts.int4, ts.int8, ts.int16,
    ts.int32, ts.int64, ts.uint8, ts.uint16, ts.uint32, ts.uint64, ts.bool, ts.tf32,
]  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 2)], ids=str)
def test_every_type_comes_back(dtype, shape, tmp_path):
    x = ts.Tensor(np.arange(int(np.prod(shape))).reshape(shape) % 2).to(dtype)
    found = ts.load(ts.save({"x": x}, tmp_path / "x.safetensors"))["x"]
    assert found.dtype == x.dtype and found.shape == x.shape
    np.testing.assert_array_equal(found.numpy(), x.numpy())


def test_containers_come_back(tmp_path):
    tree = {"a": [ts.ones((2,)), (3, "text", None)], "b": {"c": 2.5, "d": True}, "e": []}
    found = ts.load(ts.save(tree, tmp_path / "t.safetensors"))
    assert found["a"][1] == (3, "text", None) and found["b"] == {"c": 2.5, "d": True} and found["e"] == []
    pair = Pair(ts.ones((2,)), 3)
    ts.save(pair, tmp_path / "p.safetensors")
    assert ts.load(tmp_path / "p.safetensors", like=pair).b == 3
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    ts.save(model, tmp_path / "m.safetensors")
    loaded = ts.load(tmp_path / "m.safetensors", like=other)
    np.testing.assert_array_equal(loaded.weight.numpy(), model.weight.numpy())
    np.testing.assert_array_equal(other.load_state_dict(tmp_path / "m.safetensors").bias.numpy(), model.bias.numpy())
    with pytest.raises(ts.errors.StateDictError, match=r"weight has shape \[2, 3\], expected \[2, 4\]"):
        ts.load(tmp_path / "m.safetensors", like=nn.Linear(4, 2))


def test_files_of_others_are_read_and_written(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.array([True])}
    safetensors.save_file(arrays, tmp_path / "a.safetensors")
    found = ts.load(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(found["x"].numpy(), arrays["x"])
    ts.save({"x": found["x"], "step": 1}, tmp_path / "b.safetensors")
    assert safetensors.load_file(tmp_path / "b.safetensors").keys() == {"x"}


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 40, -1])
def test_truncated_files_are_named(cut, tmp_path):
    path = ts.save({"x": ts.ones((5,))}, tmp_path / "x.safetensors")
    path.write_bytes(path.read_bytes()[:cut])
    for load in (ts.load, nn.Linear(1, 1).load_state_dict):
        with pytest.raises(ts.errors.FileError, match=r"x\.safetensors is not a complete safetensors file"):
            load(path)


def test_what_cannot_be_saved_is_named_and_the_old_file_stays(tmp_path):
    path = ts.save({"x": ts.ones((2,))}, tmp_path / "x.safetensors")
    with pytest.raises(ts.errors.ArgumentError, match=r"a\.0 cannot be saved"):
        ts.save({"a": [object()]}, path)
    assert ts.load(path)["x"].shape == (2,)
    with pytest.raises(ts.errors.FileError, match="no file"):
        ts.load(tmp_path / "missing.safetensors")
    with pytest.raises(ts.errors.ArtifactError):
        ts.load(tmp_path / "folder")
    with pytest.raises(ts.errors.FileError):
        ts.save({}, tmp_path / "no" / "folder.safetensors")


def test_a_name_that_the_format_keeps_is_refused(tmp_path):
    """safetensors writes such a file, and reads it no more."""
    path = ts.save({"x": ts.ones((2,))}, tmp_path / "x.safetensors")
    with pytest.raises(ArgumentError, match="a leaf has the path '__metadata__'"):
        ts.save({"__metadata__": ts.ones((2,))}, path)
    assert ts.load(path)["x"].shape == (2,)


@pytest.mark.parametrize(
    "use",
    [lambda tree: ts.tree.map(abs, tree), ts.jit(lambda tree: tree["a"]), lambda tree: ts.save(tree, "x.safetensors")],
)
def test_keys_without_an_order_are_a_typed_error(use, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArgumentError, match="the keys of a dict have no order") as error:
        use({"a": ts.ones((2,)), 3: ts.ones((2,))})
    assert error.value.received == "int, str" and error.value.location.file == __file__


def test_files_of_other_formats_say_what_reads_them(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(3))
    np.savez(tmp_path / "a.npz", np.ones(3))
    for name, word in (("a.npy", "np.load"), ("a.npz", "torch.save or np.savez")):
        with pytest.raises(ts.errors.FileError) as error:
            nn.Linear(1, 1).load_state_dict(tmp_path / name)
        assert word in error.value.suggestion


@pytest.mark.parametrize("ending", [".bundle", ".npz", ".onnx"])
def test_an_ending_of_another_format(tmp_path, ending):
    """`ts.load` would take a .bundle for a compiled program."""
    with pytest.raises(ArgumentError, match=r"would hold tensors, and its ending names") as error:
        ts.save({"w": np.ones(2)}, tmp_path / f"m{ending}")
    assert error.value.expected == "*.safetensors" and not list(tmp_path.iterdir())


def test_files_of_other_libraries(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(2)}, tmp_path / "m.pt")
    np.savez(tmp_path / "m.npz", w=np.ones(2))
    for name, text in (("m.pt", "PyTorch wrote it"), ("m.npz", "NumPy wrote it")):
        with pytest.raises(FileError, match=text):
            ts.load(tmp_path / name)


def test_a_path_before_the_value(tmp_path):
    with pytest.raises(ts.errors.ArgumentError, match="before the value") as found:
        ts.save(str(tmp_path / "x.safetensors"), {"w": ts.ones(2)})
    assert "ts.save(value, '" in str(found.value) and not list(tmp_path.iterdir())
