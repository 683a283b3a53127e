"""Run by 4 processes: every collective over MPI equals the simulator; then a program with gradients, and refusals."""

import sys

import numpy as np
from collective_cases import CASES, DTYPES, MESHES, ROUNDED, run_case, skips

import tessera as ts
from tessera.dist.engines import load_world
from tessera.errors import CollectiveError, DeviceUnavailable

P = ts.dist.P


def check_collectives():
    for name in CASES:
        for dtype in DTYPES:
            for mesh_name in MESHES:
                if skips(name, dtype):
                    continue
                _, found = run_case(name, dtype, mesh_name, "mpi")
                _, want = run_case(name, dtype, mesh_name, "simulated")
                rounded = name in ROUNDED and dtype in ("f32", "f64", "f16", "bf16", "fp8_e4m3")
                for a, b in zip(found, want, strict=True):
                    assert a.dtype == b.dtype, (name, dtype)
                    if rounded:
                        eps = float(ts.finfo(getattr(ts, dtype)).eps)
                        np.testing.assert_allclose(a.astype("f8"), b.astype("f8"), rtol=4 * eps, err_msg=name)
                    else:
                        np.testing.assert_array_equal(a, b, err_msg=f"{name} {dtype} {mesh_name}")


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
    sys.stdout.write("checked\n")
