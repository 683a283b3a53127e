"""The names that users know distribution by are at the root, and each says what it does."""

import pytest

import tessera as ts

NAMES = """
Mesh HierarchicalMesh get_devices on_mesh mesh_view mesh_coordinate mesh_shift mesh_reduce MeshTensor MeshParameter
ShardSpec shard sharded_parameter distributed_matmul parallel_map parallel_apply parallel get_rank get_world_size
spmd manual_spmd distributed hierarchical_collective overlap_communication data_parallel pipeline expert_parallel zero
all_reduce all_gather all_gather_into reduce_scatter broadcast scatter all_to_all send recv reduce gradient_accumulation
all_reduce_async all_gather_async all_gather_into_async reduce_scatter_async broadcast_async all_to_all_async
WorkStealingScheduler
""".split()
DIST = """
mesh tensor P Pipeline simulate explain partition save_checkpoint save_checkpoint_async load_checkpoint ring_attention
column_parallel row_parallel expert_parallel ZeroOptimizer reduce_gradients collective_permute scatter gather mesh_shift
NVLINK NETWORK Link Compute
""".split()


@pytest.mark.parametrize("name", [*NAMES, *(f"dist.{n}" for n in DIST)])
def test_name(name):
    found = ts
    for part in name.split("."):
        found = getattr(found, part)
    assert found is not None and (not callable(found) or found.__doc__)


def test_members():
    for owner, names in (
        (ts.zero, "gather_params reduce_scatter_grads update_local all_gather"),
        (ts.parallel, "nested"),
        (ts.pipeline, "schedule"),
        (ts.Mesh(2, "a"), "axis shape size groups rank coordinate"),
        (ts.nn.Linear(1, 1), "on"),
    ):
        for name in names.split():
            getattr(owner, name)


def test_every_mesh_constructor():
    import numpy as np

    names = [f"cuda:{i}" for i in range(16)]
    made = [
        ts.Mesh(devices=np.arange(16).reshape(2, 4, 2), axis_names=["data", "model", "pipeline"]),
        ts.Mesh(devices=np.array(names).reshape(4, 4), axis_names=["data", "model"]),
        ts.dist.mesh(devices=names, axes=("dp", "tp", "pp"), shape=(4, 2, 2)),
        ts.HierarchicalMesh({"node": 4, "gpu": 4, "replica": 1}),
        ts.Mesh((4, 4), ("a", "b")),
        ts.Mesh(16),
        ts.Mesh([[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]], ("a", "b")),
    ]
    shapes = [(2, 4, 2), (4, 4), (4, 2, 2), (4, 4, 1), (4, 4), (16,), (2, 8)]
    assert [tuple(mesh.shape.values()) for mesh in made] == shapes and {mesh.size for mesh in made} == {16}
