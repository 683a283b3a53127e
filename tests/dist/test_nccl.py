"""The NCCL engine on a library that stands for NCCL, with the emulated GPU's memory: what it asks NCCL for is right.

`benchmarks/dist.py --engine nccl` runs the same checks on GPUs.
"""

import re
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from collective_cases import CASES, MESHES, ROUNDED, make_inputs, skips
from fake_nccl import FakeNccl, NCCLError, run_on_fake

import tessera as ts
from examples.dist import gpt
from tessera.codegen.ptx.runtime.device_memory import get_device_memory
from tessera.core.device_array import COMMUNICATION_BLOCKS
from tessera.core.effects import watch_effects
from tessera.dist import engines
from tessera.dist.parts import find_shape
from tessera.dist.ranks import CURRENT_RANK, start_in_place
from tessera.dist.rendezvous import FileRendezvous, find_rendezvous
from tessera.errors import CollectiveError, DeadlockError, DeviceUnavailable, EffectError
from tessera.tools.cli.launch import run_on_gpus

P = ts.dist.P


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "int64", "fp8_e4m3"])
@pytest.mark.parametrize("mesh_name", MESHES)
def test_collectives(mesh_name, dtype, where):
    shape, names, axes = MESHES[mesh_name]
    mesh = ts.Mesh(shape, names)
    inputs = [x.to("ptx") if where == "device" else x for x in make_inputs(dtype)]
    cases = [name for name in CASES if not skips(name, dtype) and (where == "host" or name != "all_gather_into")]

    def program():
        mine = inputs[ts.get_rank()]
        return [CASES[name][0](mine, mesh.axis(*axes)) for name in cases]

    found = run_on_fake(mesh, program)
    eps = float(ts.finfo(getattr(ts, dtype)).eps) if dtype != "int64" else 0
    for group in mesh.groups(axes):
        for number, name in enumerate(cases):
            wanted = CASES[name][1]([inputs[r].numpy() for r in group])
            for rank, want in zip(group, wanted, strict=True):
                result = found[rank][number]
                assert (result.device == "ptx") == (where == "device"), name
                rtol = 8 * eps if name in ROUNDED else 0
                np.testing.assert_allclose(result.numpy().astype("f8"), want.astype("f8"), rtol=rtol, err_msg=name)


def test_nan_and_small_types():
    rows = np.array([[np.nan, 1, -np.inf], [3, np.nan, 1]])

    def program():
        rank = ts.get_rank()
        found = [
            ts.all_reduce(ts.Tensor(rows[rank].astype(t)).to("ptx"), kind).numpy()
            for t in ("f4", "f2", "f8", ml_dtypes.bfloat16)
            for kind in ("max", "min")
        ]
        small = ts.Tensor(np.array([rank - 3, 100], "i2")).to("ptx")
        flags = ts.Tensor(np.array([rank == 0, False])).to("ptx")
        return found, ts.all_reduce(small).tolist(), ts.all_reduce(flags, "max").tolist()

    for found, small, flags in run_on_fake(ts.Mesh(2), program):
        for i, array in enumerate(found):
            np.testing.assert_array_equal(array.astype("f8"), (np.maximum, np.minimum)[i % 2](*rows))
        assert small == [-5, 200] and flags == [True, False]


def test_signs_of_integers():
    for dtype in ("i1", "i4", "i8", "u1", "u4", "u8", "i2", "u2"):
        rows = np.array([[-5, 3, 0], [2, -7, 100]]).astype(dtype)

        def program(rows=rows):
            x = ts.Tensor(rows[ts.get_rank()]).to("ptx")
            return [ts.all_reduce(x, kind).numpy() for kind in ("max", "min", "sum", "prod")]

        for found in run_on_fake(ts.Mesh(2), program):
            for array, reduce in zip(found, (np.maximum, np.minimum, np.add, np.multiply), strict=True):
                np.testing.assert_array_equal(array, reduce(*rows), err_msg=dtype)


def test_operands_stay_on_the_device():
    """Nothing passes through the host, and narrow floats are not widened: what NCCL is asked for."""
    libraries = []

    def program():
        x = ts.ones((4, 6), dtype=ts.bf16).to("ptx")
        memory, before = x.data.memory, x.data.memory.copies_out
        ts.all_gather(ts.reduce_scatter(ts.all_reduce(x, "mean"), axis=1), axis=1)
        return memory.copies_out - before

    assert run_on_fake(ts.Mesh(2), program, wrap=lambda lib: libraries.append(lib) or lib) == [0, 0]
    for library in libraries:
        assert library.calls == [("all_reduce", 24, 9, 4), ("reduce_scatter", 12, 9, 0), ("all_gather", 24, 1)]


def test_gradients_in_a_rank():
    x = np.random.default_rng(0).standard_normal((4, 6)).astype("f4")

    def loss(w):
        part = ts.shard(ts.Tensor(x).to("ptx"))
        y = ts.all_gather(part @ w)
        return ts.all_reduce((y * y).sum(), "mean")

    wanted = ts.grad(lambda w: ((ts.Tensor(x) @ w) ** 2.0).sum())(ts.ones((6, 3)))
    for found in run_on_fake(ts.Mesh(2), lambda: ts.dist.reduce_gradients(ts.grad(loss)(ts.ones((6, 3)).to("ptx")))):
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), rtol=1e-5)


def test_parts_of_an_axis():
    x = np.arange(24, dtype="i4").reshape(2, 6, 2)

    def program():
        part = ts.shard(ts.Tensor(x).to("ptx"), axis=1)
        groups = ts.Mesh(3).groups()
        placed = ts.ops.tensor.collectives.place_part(part, axis=1, groups=groups)
        return part.numpy(), placed.numpy()

    for rank, (part, placed) in enumerate(run_on_fake(ts.Mesh(3), program)):
        np.testing.assert_array_equal(part, np.split(x, 3, 1)[rank])
        np.testing.assert_array_equal(placed.sum(1), part.sum(1))
        np.testing.assert_array_equal(np.split(placed, 3, 1)[rank], part)


def test_asynchronous():
    def program():
        x = ts.full((3,), ts.get_rank() + 1.0).to("ptx")
        handles = [ts.all_reduce_async(x), ts.all_gather_async(x), ts.dist.all_to_all_async(x)]
        y = x * 2.0
        return [h.wait().tolist() for h in handles], y.device, handles[0].wait() is handles[0].wait()

    mesh = ts.Mesh(3)
    for rank, (found, device, same) in enumerate(run_on_fake(mesh, program)):
        assert found == [[6.0] * 3, [1.0] * 3 + [2.0] * 3 + [3.0] * 3, [1.0, 2.0, 3.0]], rank
        assert device == "ptx" and same


def test_empty_operands():
    def program():
        x = ts.zeros((0, 4)).to("ptx")
        return [ts.all_reduce(x).shape, ts.all_gather(x).shape, ts.reduce_scatter(x).shape]

    assert run_on_fake(ts.Mesh(2), program) == [[(0, 4)] * 3] * 2


def test_messages_by_tag():
    def program():
        if ts.get_rank() == 0:
            ts.send(ts.ones((3,)), dst=1, tag=5)
            ts.send(ts.full((2, 2), 7, dtype=ts.int32).to("ptx"), dst=1, tag=6)
            return None
        second = ts.recv(ts.zeros((2, 2), dtype=ts.int32).to("ptx"), src=0, tag=6)
        return second.tolist(), second.device, ts.recv((3,), src=0, tag=5).tolist()

    assert run_on_fake(ts.Mesh(2), program)[1] == ([[7, 7], [7, 7]], "ptx", [1.0] * 3)


def test_a_message_of_another_type():
    def program():
        if ts.get_rank() == 0:
            ts.send(ts.ones((3,)), dst=1)
        else:
            ts.recv((4,), src=0)

    with pytest.raises(CollectiveError, match="another type") as caught:
        run_on_fake(ts.Mesh(2), program)
    assert "4xf32" in caught.value.expected and "3xf32" in caught.value.received


def test_checked_collectives():
    def program():
        return ts.all_reduce(ts.ones((2,)).to("ptx"), "max" if ts.get_rank() else "sum")

    with pytest.raises(CollectiveError, match="another collective"):
        run_on_fake(ts.Mesh(2), program, check=True)


def test_an_error_of_nccl():
    class Broken(FakeNccl):
        def __init__(self, library):
            super().__init__(library.hub)

        def all_reduce(self, *_):
            raise NCCLError("UnhandledCudaError (1)")

    with pytest.raises(CollectiveError, match="UnhandledCudaError") as caught:
        run_on_fake(ts.Mesh(2), lambda: ts.all_reduce(ts.ones((2,)).to("ptx")), wrap=Broken)
    assert caught.value.received == "the last error"


@pytest.mark.parametrize("name", ["tp_dp", "zero3", "ring", "pp"])
def test_training(name, monkeypatch):
    """The GPT example, on tensors of the host: the same losses as one device."""
    wanted, module = gpt.one(gpt.Config(), 2), sys.modules["tessera.dist.spmd"]
    monkeypatch.setattr(module, "run_ranks", lambda mesh, program: dict(enumerate(run_on_fake(mesh, program))))
    np.testing.assert_allclose(gpt.STRATEGIES[name](gpt.Config(), 2), wanted, rtol=2e-6)


# The world of a process.


def test_rendezvous(tmp_path):
    found = {}

    def join(rank):
        found[rank] = FileRendezvous(tmp_path, rank, 3).share("id", (1, 0, 2), lambda: b"%d" % rank)

    threads = [threading.Thread(target=join, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert set(found.values()) == {b"1"}
    with pytest.raises(DeadlockError, match="rank 0 waits for rank 1"):
        FileRendezvous(tmp_path, 0, 2, seconds=0.02).share("other", (1, 0), bytes)


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "no launcher"),
        ({"TESSERA_WORLD_SIZE": "2", "TESSERA_RANK": "2", "TESSERA_RENDEZVOUS": "/tmp"}, "no rank"),
        ({"TESSERA_WORLD_SIZE": "2", "TESSERA_RANK": "0", "TESSERA_RENDEZVOUS": "/no/such"}, "no rank"),
    ],
)
def test_no_world(environment, text):
    with pytest.raises(DeviceUnavailable, match=text):
        find_rendezvous(environment)


def test_a_mesh_of_another_size(monkeypatch):
    class Two:
        rank, size = 0, 2

    monkeypatch.setattr(engines, "load_world", lambda *_: Two)
    with pytest.raises(DeviceUnavailable, match=re.escape("3 ranks, and the program 2 processes")) as caught:
        ts.spmd(lambda: 1, mesh=ts.Mesh(3, engine="nccl"))()
    assert "--engine nccl -n 3" in caught.value.expected


def test_the_bindings_have_these_parameters():
    nccl = pytest.importorskip("nccl.bindings.nccl")
    for name in (
        "all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv", "comm_init_rank", "comm_destroy",
        "get_last_error",
    ):  # fmt: skip
        code = getattr(FakeNccl, name).__code__
        listed = re.findall(r"(\w+)(?:,|\))", getattr(nccl, name).__doc__)
        assert listed == list(code.co_varnames[1 : code.co_argcount]), name
    assert list(nccl.DataType.__members__)[:3] and nccl.DataType(9).name == "Bfloat16"


def test_calls_after_the_first_are_the_same():
    """Direct calls: other values, shapes, types, reductions and parts of the mesh do not take each other's plan."""
    mesh = ts.Mesh((2, 2), ("a", "b"))

    def program():
        rank, found = ts.get_rank(), []
        for scale in (1.0, 10.0):
            for x in (ts.full((2, 4), scale * (rank + 1)), ts.full((4, 2), scale * (rank + 1), dtype=ts.int32)):
                x = x.to("ptx")
                found += [ts.all_reduce(x, op) for op in ("sum", "max")]
                found += [ts.all_reduce(x), *(ts.all_reduce(x, axis=name) for name in ("a", "b"))]
                with mesh.axis("b"):
                    found += [ts.all_reduce(x), ts.all_gather(x), ts.reduce_scatter(x, op="max"), ts.broadcast(x, 1)]
                found += [ts.all_gather(x, mesh.axis("a"), axis=1), ts.all_to_all(x, mesh.axis("a"), 0, 1)]
        return [y.numpy() for y in found]

    wanted = ts.spmd(program, mesh=ts.Mesh((2, 2), ("a", "b"), engine="simulated"), out_specs="ranks")()
    for rank, found in enumerate(run_on_fake(mesh, program)):
        for a, b in zip(found, wanted[rank], strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype


def test_a_direct_call_keeps_effects_and_errors():
    class Broken(FakeNccl):
        def __init__(self, library):
            super().__init__(library.hub)

        def all_reduce(self, *given):
            if len(self.calls) == 2:
                raise NCCLError("the third call")
            super().all_reduce(*given)

    def program():
        x = ts.ones((2,)).to("ptx")
        assert ts.all_reduce(x).tolist() == ts.all_reduce(x).tolist() == [2.0, 2.0]
        with watch_effects(frozenset(), "a function", "it has no effects"), pytest.raises(EffectError):
            ts.all_reduce(x)
        ts.all_reduce(x)

    with pytest.raises(CollectiveError, match="the third call") as caught:
        run_on_fake(ts.Mesh(2), program, wrap=Broken)
    assert caught.value.location.file == __file__


# The launcher: one process for each GPU that is visible.


def test_each_process_sees_its_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,6")
    text = "import os; e = os.environ; open(e['OUT'] + e['TESSERA_RANK'], 'w').write(' '.join(e[k] for k in KEYS))"
    text = f"KEYS = ('CUDA_VISIBLE_DEVICES', 'TESSERA_WORLD_SIZE', 'TESSERA_RENDEZVOUS'); {text}"
    monkeypatch.setenv("OUT", str(tmp_path / "rank"))
    assert run_on_gpus([sys.executable, "-c", text], 2) == 0
    first, second = ((tmp_path / f"rank{r}").read_text().split() for r in (0, 1))
    assert first[:2] == ["3", "2"] and second[:2] == ["5", "2"] and first[2] == second[2]
    with pytest.raises(DeviceUnavailable, match="4 ranks need 4 GPUs"):
        run_on_gpus([sys.executable, "-c", text], 4)


def test_a_process_that_fails_ends_the_others(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    text = "import os, sys, time; sys.exit(7) if os.environ['TESSERA_RANK'] == '1' else time.sleep(60)"
    start = time.monotonic()
    assert run_on_gpus([sys.executable, "-c", text], 2) == 7
    assert time.monotonic() - start < 30


def test_a_mesh_without_a_launcher():
    with pytest.raises(DeviceUnavailable, match="no launcher started"):
        ts.spmd(lambda: 1, mesh=ts.Mesh(2, engine="nccl"))()


# Compiled programs: collectives on the stream of communication.


def test_collectives_start_together_beside_kernels():
    """Those that are one call of NCCL form a group; what is queued after a call is not part of one."""
    libraries, cases = [], ("all_reduce", "reduce_scatter", "all_gather", "all_gather of columns", "all_to_all", "max")
    x = np.random.default_rng(0).standard_normal((2, 4, 6)).astype("f4")

    def program():
        memory, rank, world = get_device_memory(), ts.get_rank(), CURRENT_RANK.get().world
        attrs = {"groups": ((0, 1),), "site": "here"}
        kinds = [
            ("all_reduce", {"kind": "sum"}), ("reduce_scatter", {"kind": "mean", "axis": -2}),
            ("all_gather", {"axis": -2}), ("all_gather", {"axis": -1}), ("all_to_all", {"split": -2, "join": -1}),
            ("all_reduce", {"kind": "max"}),
        ]  # fmt: skip
        given, calls = memory.copy_in(x[rank], 0), []
        for kind, more in kinds:
            out = memory.empty(find_shape(kind, given.shape, 2, more), given.dtype, 0)
            calls.append((kind, given, out, {**attrs, **more}))
        memory.wait(0, start_in_place(calls, 0))
        assert world.prepare_recorded("all_reduce", given.dtype, (0, 1), {"kind": "sum"}, True)
        assert not world.prepare_recorded("all_reduce", given.dtype, (0, 1), {"kind": "max"}, True)
        return [out.numpy() for _, _, out, _ in calls]

    found = run_on_fake(ts.Mesh(2), program, wrap=lambda lib: libraries.append(lib) or lib)
    rows = np.split(x.sum(0) / 2, 2)
    for rank, results in enumerate(found):
        columns = np.concatenate([np.split(x[r], 2)[rank] for r in (0, 1)], 1)
        wanted = [x.sum(0), rows[rank], x.reshape(8, 6), np.concatenate([*x], 1), columns, x.max(0)]
        for name, got, want in zip(cases, results, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)
    for library in libraries:
        assert library.groups[0] == 3 and set(library.limits) == {COMMUNICATION_BLOCKS}


@pytest.mark.parametrize("check", [False, True])
def test_a_compiled_step(check):
    """Gradients that are exchanged while others are computed, on tensors of the device."""
    rng = np.random.default_rng(0)
    x, *weights = (rng.standard_normal(s).astype("f4") / 3 for s in ((4, 6), (6, 6), (6, 6), (6, 6)))

    def loss(weights, x):
        for w in weights:
            x = ts.tanh(x @ w)
        return (x * x).mean()

    def program():
        step = ts.jit(lambda ws, x: ts.dist.reduce_gradients(ts.grad(loss)(ws, x)), target="ptx")
        mine = ts.shard(ts.Tensor(x)).to("ptx")
        return [g.numpy() for g in step([ts.Tensor(w).to("ptx") for w in weights], mine)]

    wanted = ts.grad(loss)([ts.Tensor(w) for w in weights], ts.Tensor(x))
    for found in run_on_fake(ts.Mesh(2), program, check):
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want.numpy(), atol=1e-6)
