"""Run by 4 processes: every collective over MPI equals the simulator; then a program with gradients, and refusals."""

import sys
import tempfile

import numpy as np
from collective_cases import CASES, DTYPES, MESHES, ROUNDED, run_case, skips

import tessera as ts
from tessera.dist.engines import load_world
from tessera.errors import CollectiveError, DeviceUnavailable

P = ts.dist.P


def simulate_all(programs):
    """The simulator's results of all programs: each process computes a part, and every process gets all of them."""
    comm = load_world("mpi", False).comm
    own = {program: run_case(*program, "simulated")[1] for program in programs[comm.rank :: comm.size]}
    return {program: want for part in comm.allgather(own) for program, want in part.items()}


def check_collectives():
    programs = [(name, dtype, mesh) for name in CASES for dtype in DTYPES for mesh in MESHES if not skips(name, dtype)]
    wanted = simulate_all(programs)
    for name, dtype, mesh in programs:
        _, found = run_case(name, dtype, mesh, "mpi")
        rounded = name in ROUNDED and dtype in ("f32", "f64", "f16", "bf16", "fp8_e4m3")
        for a, b in zip(found, wanted[name, dtype, mesh], strict=True):
            assert a.dtype == b.dtype, (name, dtype)
            if rounded:
                eps = float(ts.finfo(getattr(ts, dtype)).eps)
                np.testing.assert_allclose(a.astype("f8"), b.astype("f8"), rtol=4 * eps, err_msg=name)
            else:
                np.testing.assert_array_equal(a, b, err_msg=f"{name} {dtype} {mesh}")


def check_gradients(engine):
    mesh = ts.Mesh((2, 2), ("dp", "tp"), engine=engine)

    @ts.spmd(mesh=mesh, in_specs=(P("dp"), P(None, "tp")), target="llvm")
    def loss(x, w):
        y = ts.all_gather(ts.transpose(ts.tanh(x @ w)), axis="tp")
        return ts.all_reduce((y * y).mean(), "mean", axis=("dp", "tp"))

    rng = np.random.default_rng(0)
    x, w = (ts.Tensor(rng.standard_normal(s).astype("f4")) for s in ((4, 3), (3, 6)))
    value, grads = ts.value_and_grad(loss, argnums=(0, 1))(x, w)
    alone, wanted = ts.value_and_grad(lambda x, w: (ts.tanh(x @ w) ** 2.0).mean(), argnums=(0, 1))(x, w)
    for a, b in zip((value, *grads), (alone, *wanted), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=2e-5, atol=1e-6)


def check_messages():
    def program():
        rank = ts.get_rank()
        ts.send(ts.full((100_000,), float(rank)), dst=(rank + 1) % 4, tag=3)
        return ts.recv((100_000,), src=(rank - 1) % 4, tag=3)[-1].item()

    assert ts.spmd(program, mesh=ts.Mesh(4), out_specs="ranks")() == [3, 0, 1, 2]


def check_refusals():
    try:
        ts.spmd(lambda: 1, mesh=ts.Mesh(3))()
    except DeviceUnavailable as error:
        assert "3 ranks" in str(error) and "4 processes" in str(error)
    else:
        raise AssertionError("a mesh of another size was accepted")
    checked = ts.Mesh(4, debug=True)

    def other_kinds():
        return ts.all_reduce(ts.ones((2,)), "max" if ts.get_rank() == 2 else "sum")

    try:
        ts.spmd(other_kinds, mesh=checked)()
    except CollectiveError as error:
        assert "rank 2" in str(error) and str(error).count(__file__) >= 2, str(error)
    else:
        raise AssertionError("other collectives were accepted")


def check_nan():
    rows = np.array([[np.nan, 1, -np.inf], [3, np.nan, 1], [1, 2, 5], [0, 0, 0]], "f4")
    for dtype in ("f64", "f32", "f16", "bf16"):
        for kind, reduce in (("max", np.maximum.reduce), ("min", np.minimum.reduce)):
            x = ts.Tensor(rows).to(getattr(ts, dtype))
            found = ts.spmd(lambda x, kind=kind: ts.all_reduce(x, kind), mesh=ts.Mesh(4), in_specs=P("ranks"))(x)
            np.testing.assert_array_equal(found.numpy().astype("f4")[0], reduce(rows), err_msg=f"{kind} {dtype}")


def check_repeated():
    """Calls after the first take a shorter way: other values, types and groups have their own results."""
    mesh = ts.Mesh((2, 2), ("a", "b"))

    def program():
        found = []
        for scale in (1, 3):
            for dtype in (ts.f32, ts.int32, ts.bf16):
                x = ts.full((2, 4), scale * (ts.get_rank() + 1), dtype=dtype)
                found += [ts.all_reduce(x, op) for op in ("sum", "max")] + [ts.all_reduce(x, axis=n) for n in "ab"]
                found += [ts.all_gather(x, mesh.axis("b"), axis=1), ts.reduce_scatter(x, mesh.axis("a"), op="max")]
        return [np.asarray(y) for y in found]

    want = ts.spmd(program, mesh=ts.Mesh((2, 2), ("a", "b"), engine="simulated"), out_specs="ranks")()
    for a, b in zip(ts.spmd(program, mesh=mesh, out_specs="ranks")(), want, strict=True):
        for found, wanted in zip(a, b, strict=True):
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)


def check_scalars():
    """Results keep the shape of a scalar, at first and repeated, and with a request that one waits for."""

    def program():
        x = ts.Tensor(np.asarray(ts.get_rank() + 1, np.float32))
        found = [ts.all_reduce(x), ts.all_reduce(x), ts.broadcast(x, 2), ts.all_reduce_async(x, "mean").wait()]
        return [(y.data.shape, y.item()) for y in found]

    want = [((), 10.0), ((), 10.0), ((), 3.0), ((), 2.5)]
    assert ts.spmd(program, mesh=ts.Mesh(4), out_specs="ranks")() == [want] * 4


def check_products():
    """A product whose rows are sent to their ranks has the simulator's bits."""
    rng = np.random.default_rng(0)
    xs, ws = (rng.integers(-60, 60, (4, *s)).astype("f4") for s in ((8, 5), (5, 6)))

    def program(target):
        def multiply(x, w):
            return ts.dist.row_parallel(x, w, scatter=True, parts="ranks")

        x, w = (ts.Tensor(a[ts.get_rank()]).to(ts.bf16) for a in (xs, ws))
        return (ts.jit(multiply, target=target) if target else multiply)(x, w).numpy().astype("f4")

    for target in (None, "llvm"):
        found, want = (
            ts.spmd(lambda: program(target), mesh=ts.Mesh(4, engine=engine), out_specs="ranks")()  # noqa: B023
            for engine in ("mpi", "simulated")
        )
        np.testing.assert_array_equal(np.stack(found), np.stack(want))


def check_background_save():
    def program():
        ts.dist.save_checkpoint_async(folder, {"w": ts.full((2,), float(ts.get_rank()))}, {"w": P("ranks")}).wait()

    with tempfile.TemporaryDirectory() as own:
        folder = load_world("mpi", False).comm.bcast(own + "/c")
        ts.spmd(program, mesh=ts.Mesh(4))()
        whole = ts.dist.load_checkpoint(folder, {"w": 0})["w"]
        np.testing.assert_array_equal(whole.numpy(), np.repeat(np.arange(4.0), 2))
        load_world("mpi", False).comm.Barrier()


def check_reproducible():
    world = load_world("mpi", reproducible=True)
    x = (np.random.default_rng(world.rank).standard_normal(1000) * 1e3).astype("f4")
    everyone = world.comm.allgather(x)
    found = world.start(world.rank, "all_reduce", x, (0, 1, 2, 3), {"kind": "sum"}, "").wait()
    np.testing.assert_array_equal(found, ((everyone[0] + everyone[1]) + everyone[2]) + everyone[3])


if __name__ == "__main__":
    check_collectives()
    check_gradients("mpi")
    check_messages()
    check_refusals()
    check_nan()
    check_reproducible()
    check_repeated()
    check_scalars()
    check_products()
    check_background_save()
    sys.stdout.write("checked\n")
