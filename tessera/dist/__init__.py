"""Distribution: meshes, shardings and collectives; programs whose ranks are simulated in one process or run by MPI.

>>> import tessera as ts
>>> mesh = ts.Mesh((4,), "data")
>>> ts.spmd(lambda x: ts.all_reduce(x.sum()), mesh=mesh, in_specs=ts.dist.P("data"))(ts.ones((8,)))
Tensor(8., f32)
"""

from tessera.dist.collectives import (
    Handle,
    all_gather,
    all_gather_async,
    all_gather_into,
    all_gather_into_async,
    all_reduce,
    all_reduce_async,
    all_to_all,
    all_to_all_async,
    barrier,
    broadcast,
    broadcast_async,
    collective_permute,
    gather,
    mesh_reduce,
    mesh_shift,
    recv,
    reduce,
    reduce_scatter,
    reduce_scatter_async,
    scatter,
    send,
    shard,
)
from tessera.dist.engines import get_devices
from tessera.dist.layers import column_parallel, expert_parallel, ring_attention, row_parallel
from tessera.dist.mesh import HierarchicalMesh, Mesh, MeshAxis
from tessera.dist.mesh import make_mesh as mesh
from tessera.dist.pipeline import Pipeline, bubble_share, count_held, list_actions
from tessera.dist.ranks import get_rank, get_world_size, mesh_coordinate
from tessera.dist.sharding import P, ShardSpec
from tessera.dist.spmd import (
    Spmd,
    distributed,
    hierarchical_collective,
    manual_spmd,
    mesh_view,
    on_mesh,
    overlap_communication,
    spmd,
)
from tessera.dist.training import DataParallel, ZeroOptimizer, data_parallel, reduce_gradients, zero

__all__ = [
    "Handle",
    "HierarchicalMesh",
    "Mesh",
    "MeshAxis",
    "P",
    "ShardSpec",
    "Spmd",
    "all_gather",
    "all_gather_async",
    "all_gather_into",
    "all_gather_into_async",
    "all_reduce",
    "all_reduce_async",
    "all_to_all",
    "all_to_all_async",
    "barrier",
    "broadcast",
    "broadcast_async",
    "collective_permute",
    "distributed",
    "gather",
    "get_devices",
    "get_rank",
    "get_world_size",
    "hierarchical_collective",
    "manual_spmd",
    "mesh",
    "mesh_coordinate",
    "mesh_reduce",
    "mesh_shift",
    "mesh_view",
    "on_mesh",
    "overlap_communication",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_async",
    "scatter",
    "send",
    "shard",
    "spmd",
    "column_parallel",
    "expert_parallel",
    "ring_attention",
    "row_parallel",
    "Pipeline",
    "bubble_share",
    "count_held",
    "list_actions",
    "DataParallel",
    "ZeroOptimizer",
    "data_parallel",
    "reduce_gradients",
    "zero",
]
