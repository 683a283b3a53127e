"""Lazy exports: the names of `tessera` whose modules are imported on first access (PEP 562)."""

# Names by module.
EXPORTS = {
    "tessera.state": "Cache KVCache PageTable RingBuffer Stateful rolling_window stateful with_state",
    "tessera.runtime.artifacts": "build",
    "tessera.deploy": "export_web optimize",
    "tessera.nn.sequence_losses": "ctc_loss",
    "tessera.runtime.bundles": "bundle",
    "tessera.runtime.tensor_files": "load save",
    "tessera.ops.tensor.layers": (
        "alpha_dropout bilinear dropout1d dropout2d dropout3d embedding_bag feature_alpha_dropout group_norm "
        "instance_norm local_response_norm"
    ),
    "tessera.ops.tensor.special_functions": "bessel_i0e bessel_i1e cbrt digamma erfinv lgamma",
    "tessera.ops.tensor.metric_losses": (
        "cosine_embedding_loss cosine_similarity gaussian_nll_loss hinge_embedding_loss linear_cross_entropy "
        "lp_normalize margin_ranking_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss "
        "pairwise_distance pdist poisson_nll_loss soft_margin_loss triplet_margin_loss "
        "triplet_margin_with_distance_loss"
    ),
    "tessera.ops.tensor.adaptive_pooling": (
        "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
        "adaptive_max_pool3d"
    ),
    "tessera.ops.tensor.pooling": (
        "avg_pool1d avg_pool2d avg_pool3d fractional_max_pool2d fractional_max_pool3d lp_pool1d "
        "lp_pool2d lp_pool3d max_pool1d max_pool2d max_pool3d max_unpool1d max_unpool2d max_unpool3d"
    ),
    "tessera.ops.tensor.resampling": (
        "affine_grid channel_shuffle grid_sample interpolate pixel_shuffle pixel_unshuffle"
    ),
    "tessera.compiler.universal": "CodeGenerator",
    "tessera.core.types": "i8",
    "tessera.nn": "Sequential",
    "tessera.research.dsl": "compile_dsl dsl",
    "tessera.research.privacy": "clip_grad_norm",
    "tessera.research.speculative": "sample speculative",
    "tessera.tools.check": "check",
    "tessera.tools.example": "example",
    "tessera.transforms.autodiff": (
        "autodiff checkpoint checkpoint_here custom_jvp custom_vjp grad hessian jacfwd jacrev jvp remat "
        "straight_through value_and_grad vjp"
    ),
    "tessera.transforms.batching": "vmap",
    "tessera.transforms.policies": (
        "LossScaler NumericalPolicy PrecisionPolicy adaptive_precision autocast dequantize fake_quantize grad_scale "
        "kahan_sum mixed_precision numerically_stable numerics precision precision_policy quantization "
        "quantization_aware quantize rounding summation unscale_grads"
    ),
    "tessera.transforms.determinism": "deterministic verify_determinism",
    "tessera.transforms.flow": (
        "accumulate_grad associative_scan cond diff_through_opt fold fori_loop gradient_accumulation implicit_diff map "
        "per_example_grad scan while_loop"
    ),
    "tessera.transforms.functional": (
        "Just Maybe Nothing compose current_device curry custom function maybe memoize persistent_cache pipe "
        "polymorphic specialize_for"
    ),
    "tessera.frontend.kernel": "Kernel autotune constexpr kernel",
    "tessera.frontend.kernel.graph_launch": "launch like",
    "tessera.frontend.kernel.memory_spaces": "memory prefetch",
    "tessera.frontend.kernel.autotuning": "Autotuner Evolutionary Guided",
    "tessera.runtime.launch.streams": "Event Stream synchronize",
    "tessera.runtime.launch.tuner": "TuningCache",
    "tessera.runtime.storage.async_copies": "async_load async_store",
    "tessera.dist": (
        "HierarchicalMesh Mesh ShardSpec all_gather all_gather_async all_gather_into all_gather_into_async all_reduce "
        "all_reduce_async all_to_all all_to_all_async barrier broadcast broadcast_async distributed get_devices "
        "get_rank get_world_size hierarchical_collective manual_spmd mesh_coordinate mesh_reduce mesh_view on_mesh "
        "overlap_communication recv reduce reduce_scatter reduce_scatter_async send shard spmd data_parallel zero "
        "MeshParameter MeshTensor WorkStealingScheduler distributed_matmul expert_parallel parallel parallel_apply "
        "parallel_map pipeline sharded_parameter"
    ),
    "tessera.serving.requests": "uuid",
    "tessera.tools.performance": "EmpiricalModel HybridModel PerformanceModel RooflineModel WarmStart time",
}
# Modules, by the names that users have for them.
NAMESPACES = ("functional", "linalg", "ml", "nn", "optim", "random", "testing", "train", "tree")
MODULES = {name: f"tessera.{name}" for name in NAMESPACES} | {
    "cache": "tessera.state.cache",
    "compiler": "tessera.compiler",
    "fusion": "tessera.compiler.fusion",
    "debug": "tessera.tools.debug",
    "deploy": "tessera.deploy",
    "dist": "tessera.dist",
    "federated": "tessera.research.federated",
    "llm": "tessera.llm",
    "meta": "tessera.research.meta",
    "models": "tessera.nn.models",
    "nas": "tessera.research.nas",
    "onnx": "tessera.onnx",
    "privacy": "tessera.research.privacy",
    "profile": "tessera.tools.profile",
    "pyflame": "tessera.pyflame",
    "stablehlo": "tessera.stablehlo",
    "monitor": "tessera.monitoring.monitor",
    "monitoring": "tessera.monitoring",
    "serving": "tessera.serving",
    "stats": "tessera.monitoring.statistics",
    "tile": "tessera.frontend.kernel.tile_api.tile",
    "torch": "tessera.torch",
    "cuda": "tessera.cuda",
    "triton": "tessera.triton",
    "verify": "tessera.tools.verify",
}
EXTRAS = ("onnx", "torch", "triton")  # modules that need another package: `from tessera import *` leaves them out
HOMES = {name: module for module, names in EXPORTS.items() for name in names.split()}
# What a module calls otherwise.
RENAMED = {"i8": "int8", "map": "map_", "remat": "checkpoint"}

# Names of PyTorch, JAX and Triton, and what to write instead: for the error of a name that is not here.
_NUMBER_TYPES = {
    "float16": "f16", "float64": "f64", "bfloat16": "bf16", "half": "f16", "double": "f64", "long": "int64",
    "int": "int32", "float": "f32",
}  # fmt: skip
SPELLINGS = {
    **{name: f"ts.{own}" for name, own in _NUMBER_TYPES.items()},
    **dict.fromkeys(("clamp", "clamp_"), "ts.clip"),
    **dict.fromkeys(("mm", "bmm"), "ts.matmul, or a @ b"),
    **dict.fromkeys(("no_grad", "inference_mode"), "ts.stop_gradient(x): only what requires_grad is recorded"),
    **dict.fromkeys(("PRNGKey", "key"), "ts.Generator(seed)"),
    **dict.fromkeys(("eval_shape", "ShapeDtypeStruct"), "ts.check(f, ts.Tensor[8, 4])"),
    **dict.fromkeys(("lax", "numpy"), "the function itself, as in ts.scan and ts.sum"),
    "amp": "ts.autocast() and ts.LossScaler",
    **dict.fromkeys(("addmm", "baddbmm"), "c + a @ b"),
    "as_tensor": "ts.asarray",
    "bincount": "ts.one_hot(x, size).sum(0)",
    "block_until_ready": "nothing: a call returns when its result is complete; ts.synchronize() waits for streams",
    "cat": "ts.concatenate",
    "cdiv": "tile.cdiv",
    "Config": "a dict: configs=[{'BLOCK': 128, 'warps': 4}]",
    "device_put": "x.to(device)",
    "do_bench": "ts.testing.bench",
    "expand_as": "ts.broadcast_to(x, y.shape)",
    "from_numpy": "ts.asarray",
    "bucketize": "ts.searchsorted(boundaries, x)",
    **dict.fromkeys(("hstack", "vstack"), "ts.concatenate"),
    "index_select": "ts.take(x, index, axis)",
    "is_tensor": "isinstance(x, ts.Tensor)",
    "jacobian": "ts.jacrev or ts.jacfwd",
    "language": "tessera.tile",
    "make_jaxpr": "ts.jit(f).trace(x), or tessera inspect",
    "next_power_of_2": "1 << (n - 1).bit_length()",
    "normalize": "ts.lp_normalize",
    "msort": "ts.sort(x, axis=0)",
    "multinomial": "ts.argmax(ts.log(p) - ts.log(-ts.log(ts.rand(p.shape))), axis=-1), for one draw of each row",
    "numel": "x.size",
    "rand_like": "ts.rand(x.shape)",
    "randn_like": "ts.randn(x.shape)",
    "repeat_interleave": "ts.repeat",
    "unfold": "ts.im2col; its inverse is ts.col2im",
    "unsqueeze": "ts.expand_dims",
    **dict.fromkeys(("upsample", "upsample_bilinear", "upsample_nearest"), "ts.interpolate"),
}
