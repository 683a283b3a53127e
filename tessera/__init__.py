"""Tessera: a tile-centric programming model for deep learning whose every level runs.

>>> import tessera as ts
>>> ts.softmax(ts.Tensor([0.0, 0.0]))
Tensor([0.5, 0.5], f32)
"""

# The names of a module wrapped, not one a line: what there is can be seen at once.
# isort: off
# fmt: off
import math
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tessera import stable
from tessera.core.device import default_device, device, set_default_device
from tessera.core.effects import effects, pure
from tessera.core.schedule import Schedule, ScheduleSpace
from tessera.core.schedule import use_schedule as schedule
from tessera.core.shapes import dims, require
from tessera.core.types import (
    DType, Policy, accum, bf16, compensated, compute, f16, f32, f64, flush_denormals, fp4, fp6, fp6_e2m3, fp8_e4m3,
    fp8_e5m2, int16, int32, int4, int64, int8, loss_scale, saturate, stochastic_round, tf32, toward_zero, uint16,
    uint32, uint64, uint8,
)
from tessera.core.types import bool_ as bool
from tessera.errors import NumericalError, TesseraError
from tessera.frontend.jit.tracing import Jit, jit
from tessera.frontend.jit.tracing import jit as compile
from tessera.ir.tensor import Tensor
from tessera.ir.tensor import Tensor as KTile
from tessera.ir.tensor import Tensor as Tile
from tessera.ir.tensor import Tensor as Tile3D
from tessera.lazy_exports import EXTRAS, HOMES, MODULES, RENAMED, SPELLINGS
from tessera.ops.api.creation import (
    arange, asarray, empty, empty_like, eye, from_dlpack, full, full_like, linspace, ones, ones_like, tensor, zeros,
    zeros_like,
)
from tessera.ops.api.dtype_info import can_cast, finfo, iinfo, isdtype, result_type
from tessera.ops.tensor.activations import (
    celu, glu, gumbel_softmax, hardshrink, hardsigmoid, hardswish, hardtanh, logsigmoid, prelu, relu6, rrelu, selu,
    softmin, softshrink, softsign, tanhshrink, threshold,
)
from tessera.ops.tensor.basic import broadcast_to, cast, dim_value, stop_gradient
from tessera.ops.tensor.bits import bitcast, count_leading_zeros, population_count, reduce_precision
from tessera.ops.tensor.contractions import dot, einsum, gemm, kron, linear, matmul, outer, vecdot
from tessera.ops.tensor.convolution import (
    col2im, conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d, conv_transpose3d, im2col,
)
from tessera.ops.tensor.decompositions import cholesky, complex_eig, det, eig, eigh, inv, qr, slogdet, solve, svd
from tessera.ops.tensor.elementwise import (
    abs, add, bitwise_and, bitwise_not, bitwise_or, bitwise_xor, ceil, cos, div, equal, erf, erfc, exp, exp2, floor,
    floor_divide, greater, greater_equal, less, less_equal, log, log2, maximum, minimum, mul, neg, not_equal, pow,
    remainder, round, rsqrt, shift_left, shift_right, sin, sqrt, sub, tanh, where,
)
from tessera.ops.tensor.logic import (
    allclose, array_equal, count_nonzero, isclose, logical_and, logical_not, logical_or, logical_xor,
)
from tessera.ops.tensor.attention_calls import scaled_dot_product_attention
from tessera.ops.tensor.losses import (
    binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy, huber_loss, kl_div, l1_loss, mse, mse_loss,
    nll_loss, smooth_l1_loss,
)
from tessera.ops.tensor.matrices import (
    cross, diag, diagonal, matrix_power, matrix_transpose, moveaxis, swapaxes, tensordot, trace,
)
from tessera.ops.tensor.nn import (
    batch_norm, dropout, elu, gelu, layer_norm, leaky_relu, log_softmax, mish, relu, rms_norm, running_statistics,
    silu, softmax, softplus,
)
from tessera.ops.tensor.random import Generator, bernoulli, manual_seed, permutation, rand, randint, randn
from tessera.ops.tensor.rearrange import (
    broadcast_arrays, chunk, diff, flip, meshgrid, narrow, one_hot, pad, repeat, roll, split, take_along_axis, tiled,
    tril, triu, unbind,
)
from tessera.ops.tensor.reduce import (
    all, any, argmax, argmin, compensated_sum, cumprod, cumsum, logsumexp, max, mean, min, norm, prod, std, sum, var,
)
from tessera.ops.tensor.running_extremes import cummax, cummin
from tessera.ops.tensor.scalar_functions import (
    acos, acosh, asin, asinh, atan, atan2, atanh, clip, copysign, cosh, expm1, fma, fmod, hypot, isfinite, isinf, isnan,
    lerp, log10, log1p, logaddexp, nan_to_num, nextafter, positive, reciprocal, sigmoid, sign, signbit, sinh, square,
    tan, trunc,
)
from tessera.ops.tensor.scatter import scatter, scatter_add, update_slice
from tessera.ops.tensor.shape import (
    concatenate, embedding, expand_dims, flatten, gather, iota, mesh_shift, permute, reshape, squeeze, stack, transpose,
)
from tessera.ops.tensor.shape import slice_ as slice
from tessera.ops.tensor.sorting import (
    argsort, index_add, masked_fill, nonzero, searchsorted, sort, take, topk, unique,
)
from tessera.stable import layernorm_safe, logsumexp_safe, rmsnorm_safe, softmax_safe
# fmt: on
# isort: on

__version__ = "0.1.0"
pi, e, inf, nan = math.pi, math.e, math.inf, math.nan
newaxis = None

if TYPE_CHECKING:
    import tessera.deploy as deploy
    import tessera.functional as functional
    import tessera.linalg as linalg
    import tessera.ml as ml
    import tessera.nn as nn
    import tessera.onnx as onnx
    import tessera.optim as optim
    import tessera.pyflame as pyflame
    import tessera.random as random
    import tessera.stablehlo as stablehlo
    import tessera.testing as testing
    import tessera.tools.debug as debug
    import tessera.tools.verify as verify
    import tessera.torch as torch
    import tessera.train as train
    import tessera.tree as tree
    from tessera.deploy import export_web, optimize
    from tessera.frontend.kernel import Kernel, autotune, constexpr, kernel
    from tessera.frontend.kernel.autotuning import Autotuner, Evolutionary, Guided
    from tessera.frontend.kernel.graph_launch import launch, like
    from tessera.frontend.kernel.memory_spaces import memory, prefetch
    from tessera.frontend.kernel.tile_api import tile
    from tessera.nn.sequence_losses import ctc_loss
    from tessera.ops.tensor.adaptive_pooling import (
        adaptive_avg_pool1d,
        adaptive_avg_pool2d,
        adaptive_avg_pool3d,
        adaptive_max_pool1d,
        adaptive_max_pool2d,
        adaptive_max_pool3d,
    )
    from tessera.ops.tensor.layers import (
        alpha_dropout,
        bilinear,
        dropout1d,
        dropout2d,
        dropout3d,
        embedding_bag,
        feature_alpha_dropout,
        group_norm,
        instance_norm,
        local_response_norm,
    )
    from tessera.ops.tensor.metric_losses import (
        cosine_embedding_loss,
        cosine_similarity,
        gaussian_nll_loss,
        hinge_embedding_loss,
        linear_cross_entropy,
        lp_normalize,
        margin_ranking_loss,
        multi_margin_loss,
        multilabel_margin_loss,
        multilabel_soft_margin_loss,
        pairwise_distance,
        pdist,
        poisson_nll_loss,
        soft_margin_loss,
        triplet_margin_loss,
        triplet_margin_with_distance_loss,
    )
    from tessera.ops.tensor.pooling import (
        avg_pool1d,
        avg_pool2d,
        avg_pool3d,
        fractional_max_pool2d,
        fractional_max_pool3d,
        lp_pool1d,
        lp_pool2d,
        lp_pool3d,
        max_pool1d,
        max_pool2d,
        max_pool3d,
        max_unpool1d,
        max_unpool2d,
        max_unpool3d,
    )
    from tessera.ops.tensor.resampling import (
        affine_grid,
        channel_shuffle,
        grid_sample,
        interpolate,
        pixel_shuffle,
        pixel_unshuffle,
    )
    from tessera.ops.tensor.special_functions import bessel_i0e, bessel_i1e, cbrt, digamma, erfinv, lgamma
    from tessera.runtime.artifacts import build
    from tessera.runtime.bundles import bundle
    from tessera.runtime.launch.streams import Event, Stream, synchronize
    from tessera.runtime.launch.tuner import TuningCache
    from tessera.runtime.storage.async_copies import async_load, async_store
    from tessera.runtime.tensor_files import load, save
    from tessera.tools.check import check  # type: ignore[no-redef]
    from tessera.tools.example import example
    from tessera.tools.performance import EmpiricalModel, PerformanceModel, RooflineModel, time
    from tessera.transforms.autodiff import (
        autodiff,
        checkpoint,
        checkpoint_here,
        custom_jvp,
        custom_vjp,
        grad,
        hessian,
        jacfwd,
        jacrev,
        jvp,
        straight_through,
        value_and_grad,
        vjp,
    )
    from tessera.transforms.autodiff import checkpoint as remat
    from tessera.transforms.batching import vmap
    from tessera.transforms.determinism import deterministic, verify_determinism
    from tessera.transforms.flow import (
        accumulate_grad,
        associative_scan,
        cond,
        diff_through_opt,
        fold,
        fori_loop,
        gradient_accumulation,
        implicit_diff,
        per_example_grad,
        scan,
        while_loop,
    )
    from tessera.transforms.flow import map_ as map
    from tessera.transforms.functional import (
        Just,
        Maybe,
        Nothing,
        compose,
        current_device,
        curry,
        custom,
        function,
        maybe,
        pipe,
        polymorphic,
        specialize_for,
    )
    from tessera.transforms.memoisation import memoize, persistent_cache
    from tessera.transforms.policies import (
        LossScaler,
        NumericalPolicy,
        PrecisionPolicy,
        adaptive_precision,
        autocast,
        dequantize,
        fake_quantize,
        grad_scale,
        kahan_sum,
        mixed_precision,
        numerically_stable,
        numerics,
        precision,
        precision_policy,
        quantization,
        quantization_aware,
        quantize,
        rounding,
        summation,
        unscale_grads,
    )


def __getattr__(name: str) -> Any:
    """A name of tessera/lazy_exports.py, imported now and kept."""
    if name in MODULES:
        found: Any = import_module(MODULES[name])
    elif name in HOMES:
        found = getattr(import_module(HOMES[name]), RENAMED.get(name, name))
    else:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}{_suggest_name(name)}", name=name)
    globals()[name] = found
    return found


def _suggest_name(name: str) -> str:
    """A hint for a name of the array API standard, of another system or of `tile` that is different here."""
    if name.startswith("_"):
        return ""
    if name in SPELLINGS:
        return f"; write {SPELLINGS[name]}"
    other = getattr(import_module("tessera.array_api"), name, None)
    if other is None:
        return f"; it is tile.{name}, for kernels" if name in import_module(MODULES["tile"]).__all__ else ""
    known = next((k for k in __all__ if globals().get(k) is other), "")
    return f"; it is ts.{known}" if known else f"; tessera.array_api.{name} has the standard's name"


def __dir__() -> list[str]:
    return [*__all__, *EXTRAS, *(name for name in globals() if name.startswith("__"))]


def _is_public(name: str) -> Any:
    """Whether a name is for users: modules are only those named here."""
    module = isinstance(globals().get(name), ModuleType) and name not in ("stable", *MODULES)
    return not (module or name.startswith("_") or name.isupper() or name in ("TYPE_CHECKING", "Any", "ModuleType"))


_NAMES = sorted({*globals(), *HOMES, *MODULES})
__all__ = [name for name in _NAMES if _is_public(name) and name not in ("import_module", "verify", "newaxis", *EXTRAS)]
