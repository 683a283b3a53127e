"""Memories of the host: placed classes, files as memory, copies under way, prefetching (programming model, 4.2)."""

import threading

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, AsyncCopyError, EffectError, ExecutionError, FileError, ShapeError


@ts.memory
class MemoryHierarchy:
    """The specification's class, with sizes of its manner that a test can hold."""

    registers: ts.Tensor["128", ts.f32] @ ts.memory("register")
    shared: ts.Tensor["1K", ts.bf16] @ ts.memory("shared")
    global_mem: ts.Tensor["1M", ts.fp8_e4m3] @ ts.memory("global")
    host_mem: ts.Tensor["2K", ts.int8] @ ts.memory("host")
    disk: ts.Tensor @ ts.memory("disk")
    scratch: ts.Tensor[4, 4, ts.bf16] @ ts.memory("disk")


@ts.memory
class Weights:
    """Memory that a device or the host has."""

    device: ts.Tensor["4", ts.f32] @ ts.memory("global")
    host: ts.Tensor["4", ts.f32] @ ts.memory("host")


def test_a_field_of_global_memory_takes_what_lies_in_that_of_the_host():
    x = np.arange(4, dtype=np.float32)
    m = Weights(device=x, host=x + 1)
    assert m.device.tolist() == [0, 1, 2, 3] and m.host.tolist() == [1, 2, 3, 4]


def test_the_host_allocates_its_own(tmp_path):
    np.save(tmp_path / "w.npy", np.arange(6.0))
    m = MemoryHierarchy(disk=tmp_path / "w.npy")
    assert m.global_mem.shape == (1 << 20,) and m.host_mem.shape == (2048,) and m.disk.tolist() == [0, 1, 2, 3, 4, 5]
    assert [ts.memory.space_of(x) for x in (m.host_mem, m.disk, m.scratch, m.scratch[1])] == [
        "host",
        "disk",
        "disk",
        "disk",
    ]
    m.disk.numpy()[0] = 9.0
    ts.memory.flush(m.disk)
    assert np.load(tmp_path / "w.npy")[0] == 9.0 and float(m.scratch.sum()) == 0
    with pytest.raises(ArgumentError, match="`shared` lies in shared memory, which a kernel allocates"):
        m.shared  # noqa: B018


def test_a_kernel_allocates_its_own():
    @ts.kernel
    def both(x):
        m = MemoryHierarchy()
        m.shared[0:4] = ts.tile.cast(x[0:4], ts.bf16)
        x[0:4] = ts.tile.cast(m.shared[0:4], ts.f32) + 1.0

    @ts.kernel
    def wrong(x):
        x[0] = MemoryHierarchy().host_mem[0]

    x = np.ones(4, "f4")
    both[1](x)
    assert x.tolist() == [2, 2, 2, 2]
    with pytest.raises(ArgumentError, match="`host_mem` lies in host memory, which the host allocates"):
        wrong[1](x)


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "`disk` of MemoryHierarchy says no shape"), ({"shared": 1}, "takes no `shared`"), ({"x": 1}, "takes no `x`"),
     ({"disk": np.ones(3)}, "this lies in host memory")],
)  # fmt: skip
def test_what_a_class_does_not_take(given, message):
    with pytest.raises(ArgumentError, match=message):
        MemoryHierarchy(**given)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "fp8_e5m2", "int8", "bool"])
def test_files_hold_every_type(tmp_path, dtype):
    x = ts.memory.on_disk(tmp_path / "x.npy", (3, 2), dtype)
    x.numpy()[1] = 1
    ts.memory.flush(x)
    again = ts.memory.on_disk(tmp_path / "x.npy", dtype=dtype)
    assert again.dtype == x.dtype and again.numpy().astype("f4").tolist() == [[0, 0], [1, 1], [0, 0]]


def test_files_that_are_none(tmp_path):
    (tmp_path / "bad.npy").write_bytes(b"no")
    for path in ("missing.npy", "bad.npy"):
        with pytest.raises(FileError):
            ts.memory.on_disk(tmp_path / path)
    with pytest.raises(FileError, match="cannot be made"):
        ts.memory.on_disk(tmp_path / "no" / "x.npy", (2,))


def test_copies_run_beside_the_program(tmp_path, monkeypatch):
    gate = threading.Event()
    copyto = np.copyto
    monkeypatch.setattr(np, "copyto", lambda a, b: (gate.wait(5), copyto(a, b)))
    target = np.zeros(3, "f4")
    future = ts.memory.async_copy(ts.Tensor([1.0, 2.0, 3.0]), ts.Tensor(target))
    assert not future.done() and target.sum() == 0
    with pytest.raises(ExecutionError, match=r"not done after 0\.01 s"):
        future.wait(timeout=0.01)
    gate.set()
    assert future.wait().tolist() == [1, 2, 3] and target.sum() == 6 and future.done()


def test_between_memories(tmp_path):
    x = ts.Tensor([[1.0, 2.0]], dtype=ts.bf16)
    there = ts.memory.async_copy(x, to="disk", path=tmp_path / "x.npy").wait()
    back = ts.memory.async_copy(there, to="host").result()
    assert [ts.memory.space_of(t) for t in (there, back)] == ["disk", "host"]
    assert back.dtype == ts.bf16 and back.tolist() == [[1, 2]]
    assert ts.memory.async_copy(back, to="global").wait().tolist() == [[1, 2]]


def test_a_source_that_changes_is_found_in_debug_mode():
    x = ts.Tensor([1.0, 2.0])
    with ts.debug.checked():
        future = ts.memory.async_copy(x, to="host")
        x.numpy()[0] = 5.0
        with pytest.raises(AsyncCopyError, match="written before its wait"):
            future.wait()


def test_copies_that_cannot_be():
    x = ts.Tensor([1.0])
    with pytest.raises(ArgumentError, match="into a tensor or to a memory"):
        ts.memory.async_copy(x)
    with pytest.raises(ArgumentError, match="needs a file"):
        ts.memory.async_copy(x, to="disk")
    with pytest.raises(ArgumentError, match='"wse" is not a memory'):
        ts.memory.async_copy(x, to="wse")
    with pytest.raises(ShapeError, match="the two sides"):
        ts.memory.async_copy(x, ts.Tensor([1.0, 2.0]))


def test_efficient_compute(tmp_path):
    """The specification's function: eager, traced, and with its tensor on disk."""

    def efficient_compute(x: ts.Tensor @ ts.memory("global"), to: str = "shared"):
        with ts.memory.prefetch(x, to=to) as near:
            result = ts.exp(near)
        future = ts.memory.async_copy(result, to="global")
        total = result + x
        return total + 0.0 * future.wait()

    x = ts.memory.on_disk(tmp_path / "x.npy", (8,))
    want = [1.0] * 8
    assert efficient_compute(x).tolist() == ts.function(efficient_compute)(x).tolist() == want
    assert efficient_compute(x, to="host").tolist() == want
    with pytest.raises(ArgumentError, match='"attic" is not a memory to prefetch into'):
        efficient_compute(x, to="attic")


def test_prefetching_has_an_effect():
    @ts.effects(["memory"])
    def declared(x):
        ts.memory.prefetch_to_l2(x)

    declared(ts.ones(100))
    with pytest.raises(EffectError, match="memory"):
        ts.pure(lambda x: ts.memory.prefetch_to_l2(x))(ts.ones(100))
