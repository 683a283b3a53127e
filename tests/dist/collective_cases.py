"""Collectives, each with what NumPy computes from the tensors of all ranks of a group."""

import functools

import numpy as np

import tessera as ts

NUMPY = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


def fold(kind, arrays):
    """The reduction in the order of the ranks; narrow floats in f32."""
    dtype = arrays[0].dtype
    wide = [a.astype(np.float32) if dtype.itemsize < 4 and dtype.kind not in "iub" else a for a in arrays]
    total = functools.reduce(NUMPY["sum" if kind == "mean" else kind], wide)
    return (total / np.asarray(len(arrays), total.dtype) if kind == "mean" else total).astype(dtype)


# name: (the call of a rank on its tensor of shape (4, 8), the results of a group from its tensors)
CASES = {
    **{
        f"all_reduce {kind}": (
            lambda x, where, kind=kind: ts.all_reduce(x, kind, where),
            lambda xs, kind=kind: [fold(kind, xs)] * len(xs),
        )
        for kind in ("sum", "mean", "max", "min", "prod")
    },
    "all_gather": (lambda x, where: ts.all_gather(x, where, axis=1), lambda xs: [np.concatenate(xs, 1)] * len(xs)),
    "reduce_scatter": (
        lambda x, where: ts.reduce_scatter(x, where, axis=1),
        lambda xs: np.split(fold("sum", xs), len(xs), 1),
    ),
    "reduce_scatter max": (
        lambda x, where: ts.reduce_scatter(x, where, axis=0, op="max"),
        lambda xs: np.split(fold("max", xs), len(xs), 0),
    ),
    "broadcast": (lambda x, where: ts.broadcast(x, 1, where), lambda xs: [xs[1]] * len(xs)),
    "scatter": (lambda x, where: ts.dist.scatter(x, where, axis=1, src=1), lambda xs: np.split(xs[1], len(xs), 1)),
    "gather": (
        lambda x, where: ts.dist.gather(x, where, axis=0, dst=1),
        lambda xs: [np.concatenate(xs) * (i == 1) for i in range(len(xs))],
    ),
    "all_to_all": (
        lambda x, where: ts.all_to_all(x, where, split_axis=1, concat_axis=0),
        lambda xs: [np.concatenate([np.split(x, len(xs), 1)[i] for x in xs], 0) for i in range(len(xs))],
    ),
    "permute": (
        lambda x, where: ts.dist.collective_permute(x, [(0, 1)], where),
        lambda xs: [xs[0] if i == 1 else np.zeros_like(xs[0]) for i in range(len(xs))],
    ),
    "all_reduce_async": (
        lambda x, where: ts.all_reduce_async(x, "max", where).wait(),
        lambda xs: [fold("max", xs)] * len(xs),
    ),
    "all_gather_into": (
        lambda x, where: ts.all_gather_into(ts.zeros((where.size, 4, 8), dtype=x.dtype), x, where),
        lambda xs: [np.stack(xs)] * len(xs),
    ),
}
# Cases whose result is the same on every bit only in the order of the simulator.
ROUNDED = ("all_reduce sum", "all_reduce mean", "all_reduce prod", "reduce_scatter")
MESHES = {"flat": ((4,), ("x",), ("x",)), "rows": ((2, 2), ("x", "y"), ("x",)), "all": ((2, 2), ("x", "y"), ("y", "x"))}
DTYPES = ("f32", "f64", "f16", "bf16", "int8", "int32", "int64", "uint8", "fp8_e4m3")


def make_inputs(dtype, count=4):
    """A tensor for each rank."""
    rng = np.random.default_rng(1)
    return [ts.Tensor(rng.uniform(1, 3, (4, 8)).astype("f4")).to(getattr(ts, dtype)) for _ in range(count)]


def skips(name, dtype):
    return name.endswith("mean") and not getattr(ts, dtype).is_float


def run_case(name, dtype, mesh_name, engine):
    """The mesh, and the results of all ranks."""
    shape, names, axes = MESHES[mesh_name]
    mesh, inputs = ts.Mesh(shape, names, engine=engine), make_inputs(dtype)
    program = ts.spmd(lambda xs: CASES[name][0](xs[ts.get_rank()], mesh.axis(*axes)), mesh=mesh, out_specs="ranks")
    return mesh.groups(axes), [np.asarray(r) for r in program(inputs)]
