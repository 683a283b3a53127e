"""Mesh tensors and parallel calls: the constructors of the guide, operators in parts, functions on devices."""

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError, ShapeError

rng = np.random.default_rng(5)
mesh = ts.dist.mesh(devices=["cuda:0", "cuda:1"], axes=("tp",), shape=(2,))


def draw(*shape):
    return ts.Tensor(rng.standard_normal(shape).astype("f4"))


def test_tensors_of_the_guide():
    columns = ts.ShardSpec(partition=("col",), mesh_axes=("tp",))
    w = ts.dist.tensor(shape=(8, 6), layout=columns, mesh=mesh, dtype="bf16")
    assert w.shape == (8, 6) and w.dtype == ts.bf16 and w.local(1).shape == (8, 3)
    both = ts.ShardSpec(partition=("row", "col"), mesh_axes=("dp", "tp"))
    grid = ts.dist.mesh(devices=[f"cuda:{i}" for i in range(4)], axes=("dp", "tp"), shape=(2, 2))
    assert ts.dist.tensor((8, 6), both, grid).local(3).shape == (4, 3)
    with pytest.raises(ShapeError, match="no 2 equal parts"):
        ts.dist.tensor((8, 5), columns, mesh)
    with pytest.raises(ArgumentError, match="no axis 'dp'"):
        ts.dist.tensor((8, 6), both, mesh)
    with pytest.raises(ArgumentError, match="one entry of mesh_axes"):
        ts.ShardSpec(partition=("row",), mesh_axes=())


def test_operators_run_in_parts():
    x, w = draw(4, 8), draw(8, 6)
    rows = ts.MeshTensor(w, mesh, ts.ShardSpec.row("tp"))
    y = (x @ rows + 1.0) * 2.0 - rows.value[0, 0]
    np.testing.assert_allclose(y, (x.numpy() @ w.numpy() + 1) * 2 - w.numpy()[0, 0], rtol=1e-4, atol=1e-5)
    columns = ts.MeshTensor(w, mesh, ts.ShardSpec.col("tp"))
    assert (-(columns / 2.0)).spec == ts.ShardSpec((1,), (("tp",),))
    with pytest.raises(ArgumentError, match="other meshes"):
        rows + ts.MeshTensor(w, ts.Mesh(2, "tp"))
    with pytest.raises(ArgumentError, match="no rank 2"):
        rows.local(2)


def test_operators_with_numbers_keep_the_type():
    mesh = ts.Mesh((2, 3), ("dp", "tp"))
    rows = np.arange(1, 25, dtype="f4").reshape(4, 6)
    for dtype in (ts.bf16, ts.f32, ts.f64):
        x = ts.MeshTensor(ts.Tensor(rows).to(dtype), mesh, ts.dist.P("dp", "tp"))
        for found, want in ((x + 1.0, rows + 1), (2 * x, 2 * rows), (x**2.0, rows**2), (1.0 - x, 1 - rows)):
            assert found.dtype == dtype and found.spec.dims(2) == (("dp",), ("tp",))
            np.testing.assert_allclose(found.numpy().astype("f4"), want, rtol=2**-8)
        np.testing.assert_allclose((1.0 / x).numpy().astype("f4"), 1 / rows, rtol=2**-8)
    whole = ts.MeshTensor(ts.arange(6), mesh, ts.dist.P("tp"))
    assert (whole + 1).dtype == ts.int64 and (whole + 1.0).dtype == ts.f32


def test_parallel_linear_of_the_guide():
    weight = ts.sharded_parameter(shape=(8, 6), devices=["gpu:0", "gpu:1"], axis=1)
    x = draw(4, 8)
    np.testing.assert_allclose(ts.distributed_matmul(x, weight), x.numpy() @ weight.numpy(), rtol=1e-5, atol=1e-5)
    g = ts.grad(lambda x: ts.distributed_matmul(x, weight).sum())(x)
    np.testing.assert_allclose(g, np.tile(weight.numpy().sum(1), (4, 1)), rtol=1e-4, atol=1e-5)
    with pytest.raises(ArgumentError, match="no operand is a mesh tensor"):
        ts.distributed_matmul(x, draw(8, 6))


def test_parameters_of_a_class_on_a_mesh():
    grid = ts.Mesh(devices=np.arange(16).reshape(2, 4, 2), axis_names=["data", "model", "pipeline"])

    @ts.on_mesh(grid)
    class Model:
        def __init__(self):
            self.embedding = ts.MeshParameter(shape=(16, 8), mesh_axes={"row": "model", "col": None}, init=ts.ones)

        def forward(self, x):
            return x @ self.embedding

    model = Model()
    assert model.embedding.local(2).shape == (4, 8)
    np.testing.assert_allclose(model.forward(ts.ones((3, 16))), np.full((3, 8), 16.0))
    with pytest.raises(ArgumentError, match="needs a mesh"):
        ts.MeshParameter((2, 2), {})


def test_mesh_view_of_the_guide():
    grid = ts.Mesh((2, 2), ("rows", "columns"))

    @ts.dist.mesh_view(grid, out_specs="ranks")
    def around(x):
        return (x + ts.dist.mesh_shift(x, axis=0, shift=-1) + ts.dist.mesh_shift(x, axis=1, shift=1)) / 3.0

    assert [float(a.numpy()[0]) for a in around(ts.ones((1,)))] == [1.0] * 4


def test_programs_of_the_guide():
    four = ts.Mesh(4, "data")

    @ts.spmd
    def spmd_program(global_input, mesh):
        return ts.all_gather(ts.shard(global_input, mesh) * 2.0, mesh)

    x = draw(8, 3)
    np.testing.assert_array_equal(spmd_program(x, four), x.numpy() * 2)

    @ts.manual_spmd
    def manual(x, mesh):
        rank, size = ts.get_rank(), ts.get_world_size()
        chunk = x.shape[0] // size
        local = x[rank * chunk : (rank + 1) * chunk] + 1.0
        gathered = ts.empty((size, chunk, *local.shape[1:]))
        ts.all_gather_into(gathered, local)
        return gathered.reshape(x.shape)

    np.testing.assert_array_equal(manual(x, four), x.numpy() + 1)

    @ts.hierarchical_collective
    def two_levels(x, mesh):
        return ts.reduce(ts.reduce(x, mesh.axis("gpu"), op="sum"), mesh.axis("node"), op="sum")

    assert two_levels(ts.ones((2,)), ts.HierarchicalMesh({"node": 2, "gpu": 3})).tolist() == [6, 6]


def test_parallel_calls():
    x = draw(8, 3)
    parts = ts.shard(x, axis=0, devices=["gpu:0", "gpu:1"])
    outs = ts.parallel_map(lambda part, device: part * float(device[-1]), parts, ["gpu:0", "gpu:1"])
    np.testing.assert_array_equal(outs[1], x.numpy()[4:])
    np.testing.assert_allclose(ts.reduce(outs, op="mean", axis=0), x.numpy()[4:] / 2)
    assert [t.item() for t in ts.parallel_apply([lambda x: x.sum(), ts.max], [ts.ones((3,)), ts.ones((2,))])] == [3, 1]
    with pytest.raises(ArgumentError, match="2 items for 1 devices"):
        ts.parallel_map(lambda a, d: a, parts, ["gpu:0"])
    with pytest.raises(ArgumentError, match="has no mesh"):
        ts.parallel(level="node")(lambda x: x)(x)
    with pytest.raises(ShapeError, match="no 3 equal parts"):
        ts.shard(x, axis=0, devices=[0, 1, 2])


def test_nested_levels():
    @ts.parallel.nested
    def nested(data):
        @ts.parallel(level="node")
        def shard(part):
            @ts.parallel(level="gpu")
            def chunk(piece):
                return ts.parallel(level="warp")(lambda e: e + 10.0 * ts.get_rank())(piece)

            return chunk(part)

        return shard(data)

    with ts.HierarchicalMesh({"node": 2, "gpu": 2}):
        assert nested(ts.arange(8.0)).tolist() == [0, 1, 12, 13, 24, 25, 36, 37]
