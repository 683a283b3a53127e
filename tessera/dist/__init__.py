"""Distribution: meshes, shardings and collectives; programs whose ranks are simulated in one process or run by MPI.

>>> import tessera as ts
>>> mesh = ts.Mesh((4,), "data")
>>> ts.spmd(lambda x: ts.all_reduce(x.sum()), mesh=mesh, in_specs=ts.dist.P("data"))(ts.ones((8,)))
Tensor(8., f32)
"""

from tessera.dist.background_saves import PendingSave, save_checkpoint_async
from tessera.dist.checkpoints import load_checkpoint, save_checkpoint
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
from tessera.dist.explanation import Explanation, explain
from tessera.dist.layers import column_parallel, expert_parallel, ring_attention, row_parallel
from tessera.dist.mesh import HierarchicalMesh, Mesh, MeshAxis
from tessera.dist.mesh import make_mesh as mesh
from tessera.dist.partition import Partitioned, partition
from tessera.dist.pipeline import Pipeline, bubble_share, count_held, list_actions
from tessera.dist.pipeline_models import pipeline
from tessera.dist.prediction import Prediction, simulate
from tessera.dist.propagation import NETWORK, NVLINK, Layout, Link
from tessera.dist.rank_program import Compute
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
from tessera.dist.tasks import parallel, parallel_apply, parallel_map
from tessera.dist.tensors import MeshParameter, MeshTensor, distributed_matmul, sharded_parameter
from tessera.dist.tensors import make_tensor as tensor
from tessera.dist.training import DataParallel, ZeroOptimizer, data_parallel, reduce_gradients, zero
from tessera.dist.work_stealing import WorkStealingScheduler

__all__ = [
    "pipeline",
    "WorkStealingScheduler",
    "PendingSave",
    "save_checkpoint_async",
    "Compute",
    "Prediction",
    "simulate",
    "DataParallel",
    "Explanation",
    "Handle",
    "HierarchicalMesh",
    "Layout",
    "Link",
    "Mesh",
    "MeshAxis",
    "MeshParameter",
    "MeshTensor",
    "NETWORK",
    "NVLINK",
    "P",
    "Partitioned",
    "Pipeline",
    "ShardSpec",
    "Spmd",
    "ZeroOptimizer",
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
    "bubble_share",
    "collective_permute",
    "column_parallel",
    "count_held",
    "data_parallel",
    "distributed",
    "distributed_matmul",
    "expert_parallel",
    "explain",
    "gather",
    "get_devices",
    "get_rank",
    "get_world_size",
    "hierarchical_collective",
    "list_actions",
    "load_checkpoint",
    "manual_spmd",
    "mesh",
    "mesh_coordinate",
    "mesh_reduce",
    "mesh_shift",
    "mesh_view",
    "on_mesh",
    "overlap_communication",
    "parallel",
    "parallel_apply",
    "parallel_map",
    "partition",
    "recv",
    "reduce",
    "reduce_gradients",
    "reduce_scatter",
    "reduce_scatter_async",
    "ring_attention",
    "row_parallel",
    "save_checkpoint",
    "scatter",
    "send",
    "shard",
    "sharded_parameter",
    "spmd",
    "tensor",
    "zero",
]
