"""Loads and stores that run beside what is computed (programming model, 13.2)."""

import threading

import numpy as np
import pytest
from everywhere import everywhere

import tessera as ts
from tessera.core.errors import ArgumentError, AsyncCopyError, ShapeError, UnsupportedSyntaxError
from tessera.runtime import storage
from tessera.runtime.storage import async_copies


def batches(count=4, size=8):
    return [ts.Tensor(np.arange(size, dtype="f4") + i) for i in range(count)]


@ts.memory.pipeline(stages=3)
def pipelined_compute(data_stream):
    """The specification's, with its results in a list."""
    results, prev_result = [], None
    for i, batch in enumerate(data_stream):
        if i < len(data_stream) - 1:
            ts.async_load(data_stream[i + 1])
        result = ts.exp(batch) * 2.0
        if i > 0:
            ts.async_store(prev_result, results)
        prev_result = result
    ts.async_store(prev_result, results)
    return results


def test_the_specifications_pipeline():
    for stream in (batches(), tuple(batches()), batches(1)):
        assert [r.tolist() for r in pipelined_compute(stream)] == [(ts.exp(x) * 2.0).tolist() for x in stream]


def test_on_every_engine():
    everywhere(lambda x, y, z: tuple(pipelined_compute([x, y, z])), *(b.numpy() for b in batches(3)))


def test_batches_on_disk_are_loaded_and_results_stored_there(tmp_path):
    stream = [ts.memory.on_disk(tmp_path / f"{i}.npy", (4,)) for i in range(3)]
    for i, batch in enumerate(stream):
        batch.numpy()[:] = i
    seen = []

    @ts.memory.pipeline(stages=2)
    def work(stream):
        for i, batch in enumerate(stream):
            if i + 1 < len(stream):
                ts.async_load(stream[i + 1])
            seen.append(ts.memory.space_of(batch))
            ts.async_store(batch + 1.0, tmp_path / f"out{i}.npy")

    work(stream)
    assert seen == ["disk", "host", "host"]
    assert [np.load(tmp_path / f"out{i}.npy").tolist() for i in range(3)] == [[i + 1.0] * 4 for i in range(3)]


def test_a_load_runs_beside_what_is_computed():
    loading, computed = threading.Event(), threading.Event()

    def source():
        loading.set()
        assert computed.wait(10)
        return ts.ones((2,))

    @ts.memory.pipeline(stages=1)
    def work(_):
        load = ts.async_load(source)
        assert loading.wait(10) and not load.done()
        computed.set()
        return load.wait().tolist()

    assert work(()) == [1.0, 1.0]


def test_no_more_are_under_way_than_stages(monkeypatch):
    most = []
    begin = async_copies.CopyPipeline.begin
    monkeypatch.setattr(
        async_copies.CopyPipeline,
        "begin",
        lambda self, start: (begin(self, start), most.append(len(self.under_way)))[0],
    )
    pipelined_compute(batches(9))
    assert max(most) == 3


def test_results_are_copies_in_order_and_into_memory_that_is_there():
    out, held = np.zeros((2, 3), np.float32), []

    @ts.memory.pipeline()
    def work(rows):
        buffer = np.zeros(3, np.float32)
        for i in range(2):
            buffer[:] = i + 1
            ts.async_store(buffer, out[i]).wait()
            ts.async_store(buffer, held).wait()

    work([])
    assert out.tolist() == [[1] * 3, [2] * 3] and [h.tolist() for h in held] == out.tolist()


def test_containers_and_a_batch_loaded_twice():
    stream = [{"x": x, "y": (x, x)} for x in batches(2)]

    @ts.memory.pipeline()
    def work(stream):
        assert ts.async_load(stream[1]) is ts.async_load(stream[1])
        return [b["x"].sum().item() + b["y"][1].sum().item() for b in stream]

    assert work(stream) == [56.0, 72.0]


def test_what_fails_is_raised_by_the_call():
    def broken():
        raise OSError("the disk is gone")

    @ts.memory.pipeline()
    def work(stream, error=None):
        ts.async_load(broken)
        if error:
            raise error

    with pytest.raises(OSError, match="the disk is gone"):
        work([])
    with pytest.raises(KeyError):  # what the function itself raises comes first
        work([], KeyError())
    with pytest.raises(ShapeError, match="two sides of a copy differ"):
        ts.async_store(ts.ones((2,)), np.zeros(3, np.float32))


def test_writing_what_is_being_stored_is_reported():
    x = np.zeros(4, np.float32)
    with ts.debug.checked():
        store = ts.async_store(x)
        store._future._task.result()
        x[0] = 1.0
        with pytest.raises(AsyncCopyError, match="written before its wait"):
            store.wait()


def test_of_a_kernel_it_is_the_stages_of_its_schedule():
    @ts.memory.pipeline(stages=3)
    @ts.kernel
    def double(x, out):
        i = ts.tile.program_id(0)
        out[i] = x[i] * 2.0

    out = np.zeros(4, np.float32)
    double[(4,)](np.ones(4, np.float32), out)
    assert double.schedule.stages == 3 and out.tolist() == [2.0] * 4


def test_refusals():
    @ts.kernel
    def loads(x, out):
        ts.async_load(x[0])

    with pytest.raises(UnsupportedSyntaxError, match=r"async_load is a function of the host(?s:.)*tile.cp_async"):
        loads[(1,)](np.ones(4, np.float32), np.ones(4, np.float32))
    with pytest.raises(ArgumentError, match="a traced|is traced"):
        ts.jit(lambda x: storage.async_store(x, np.zeros(2, np.float32)) and x)(np.ones(2, np.float32))
    for wrong in (0, True, "3"):
        with pytest.raises(ArgumentError, match="number of copies"):
            ts.memory.pipeline(stages=wrong)(len)
    with pytest.raises(ArgumentError, match="made of a function"):
        ts.memory.pipeline(3)(4)
    with pytest.raises(ArgumentError, match="not a memory to copy to"):
        ts.async_load(ts.ones((2,)), to="shared")


def test_what_the_host_holds_is_loaded_as_it_is():
    x, array = ts.Tensor([1.0]), np.ones(3)
    assert ts.async_load(x, to="host").wait() is x
    assert ts.async_load({"a": array}, to="host").wait()["a"] is array


def test_a_load_is_done_when_all_its_parts_are():
    gate = threading.Event()
    first, second = async_copies.run_async(lambda: 1), async_copies.run_async(gate.wait)
    load = async_copies.AsyncLoad([first, second], list)
    begun = first.wait(), load.done()
    gate.set()  # before what may fail: a pool of threads is joined at exit
    assert begun == (1, False)
    assert load.wait() == [1, True] and load.done()


def test_loads_after_the_call_are_no_part_of_the_pipeline():
    pipelined_compute(batches(2))
    assert async_copies.ACTIVE_PIPELINE.get() is None
