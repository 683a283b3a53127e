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
from tessera.autodiff import (
    autodiff, checkpoint, checkpoint_here, custom_jvp, custom_vjp, grad, hessian, jacfwd, jacrev, jvp, straight_through,
    value_and_grad, vjp,
)
from tessera.batching import vmap
from tessera.device import default_device, set_default_device
from tessera.effect import effects, pure
from tessera.errors import NumericalError, TesseraError
from tessera.example import example
from tessera.kernel import Kernel, Tile, autotune, constexpr, kernel
from tessera.later import HOMES, MODULES, RENAMED
from tessera.ops.activations import elu, leaky_relu, mish, softplus
from tessera.ops.adjacent import nextafter
from tessera.ops.arithmetic import (
    acosh, asinh, atanh, copysign, hypot, lerp, logaddexp, nan_to_num, positive, reciprocal, signbit, square,
)
from tessera.ops.arrange import (
    broadcast_arrays, chunk, diff, flip, meshgrid, narrow, one_hot, pad, repeat, roll, split, take_along_axis, tiled,
    tril, triu, unbind,
)
from tessera.ops.basic import broadcast_to, cast, stop_gradient
from tessera.ops.compensated import compensated_sum
from tessera.ops.conv import avg_pool2d, conv1d, conv2d, max_pool2d
from tessera.ops.creation import (
    arange, asarray, empty, empty_like, eye, from_dlpack, full, full_like, linspace, ones, ones_like, tensor, zeros,
    zeros_like,
)
from tessera.ops.cumulative import cumprod, cumsum
from tessera.ops.decompose import cholesky, det, eig, eigh, inv, qr, slogdet, solve, svd
from tessera.ops.einsum import einsum
from tessera.ops.elementwise import (
    abs, add, bitwise_and, bitwise_not, bitwise_or, bitwise_xor, ceil, cos, div, equal, erf, exp, exp2, floor,
    floor_divide, greater, greater_equal, less, less_equal, log, log2, maximum, minimum, mul, neg, not_equal, pow,
    remainder, round, rsqrt, shift_left, shift_right, sin, sqrt, sub, tanh, where,
)
from tessera.ops.functions import (
    acos, asin, atan, atan2, clip, cosh, expm1, fma, isfinite, isinf, isnan, log1p, log10, sign, sinh, tan, trunc,
)
from tessera.ops.info import can_cast, finfo, iinfo, isdtype, result_type
from tessera.ops.linalg import dot, linear, matmul
from tessera.ops.logic import (
    allclose, array_equal, count_nonzero, isclose, logical_and, logical_not, logical_or, logical_xor,
)
from tessera.ops.loss import (
    binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy, huber_loss, kl_div, l1_loss, mse, mse_loss,
    nll_loss,
)
from tessera.ops.matrices import (
    cross, diag, diagonal, matrix_power, matrix_transpose, moveaxis, swapaxes, tensordot, trace,
)
from tessera.ops.neighbour import mesh_shift
from tessera.ops.nn import (
    gelu, layer_norm, log_softmax, relu, rms_norm, scaled_dot_product_attention, sigmoid, silu, softmax,
)
from tessera.ops.places import index_add, masked_fill, nonzero, searchsorted, take, unique
from tessera.ops.products import gemm, kron, outer, vecdot
from tessera.ops.random import Generator, bernoulli, manual_seed, permutation, rand, randint, randn
from tessera.ops.reduce import argmax, argmin, max, mean, min, sum, var
from tessera.ops.shape import (
    concatenate, embedding, expand_dims, flatten, gather, iota, permute, reshape, squeeze, stack, transpose,
)
from tessera.ops.shape import slice_ as slice
from tessera.ops.sort import argsort, sort, topk
from tessera.ops.statistics import all, any, logsumexp, norm, prod, std
from tessera.ops.training import batch_norm, dropout, running_statistics
from tessera.ops.update import scatter, scatter_add
from tessera.policies import (
    LossScaler, NumericalPolicy, PrecisionPolicy, adaptive_precision, autocast, dequantize, fake_quantize, grad_scale,
    kahan_sum, mixed_precision, numerically_stable, numerics, precision, precision_policy, quantization,
    quantization_aware, quantize, rounding, summation, unscale_grads,
)
from tessera.schedule import Schedule
from tessera.schedule_space import ScheduleSpace
from tessera.shapes import dims, require
from tessera.stable import layernorm_safe, logsumexp_safe, rmsnorm_safe, softmax_safe
from tessera.tensor import Tensor
from tessera.tracing import Jit, jit
from tessera.tracing import jit as compile
from tessera.types import (
    DType, Policy, accum, bf16, compensated, compute, f16, f32, f64, flush_denormals, fp4, fp6, fp6_e2m3, fp8_e4m3,
    fp8_e5m2, int4, int8, int16, int32, int64, loss_scale, saturate, stochastic_round, tf32, toward_zero, uint8, uint16,
    uint32, uint64,
)
from tessera.types import bool_ as bool
# fmt: on
# isort: on

__version__ = "0.1.0"
pi, e, inf, nan = math.pi, math.e, math.inf, math.nan
newaxis = None

if TYPE_CHECKING:
    import tessera.debug as debug
    import tessera.linalg as linalg
    import tessera.ml as ml
    import tessera.random as random
    import tessera.verify as verify
    from tessera.artifacts import build, load
    from tessera.checking import check  # type: ignore[no-redef]
    from tessera.determinism import deterministic, verify_determinism
    from tessera.flow import (  # type: ignore[no-redef]
        accumulate_grad,
        cond,
        diff_through_opt,
        fold,
        fori_loop,
        gradient_accumulation,
        implicit_diff,
        optimize,
        per_example_grad,
        scan,
        while_loop,
    )
    from tessera.flow import map_ as map
    from tessera.functional import (  # type: ignore[no-redef]
        Just,
        Maybe,
        Nothing,
        compose,
        current_device,
        curry,
        function,
        maybe,
        memoize,
        persistent_cache,
        pipe,
        polymorphic,
        specialize_for,
    )
    from tessera.kernel import tile
    from tessera.kernel.placement import memory
    from tessera.kernel.streams import Event, Stream, synchronize
    from tessera.kernel.tuning.cache import TuningCache
    from tessera.kernel.tuning.search import Autotuner, Evolutionary, Guided
    from tessera.performance import EmpiricalModel, PerformanceModel, RooflineModel, time
    from tessera.storage.pipelines import async_load, async_store


def __getattr__(name: str) -> Any:
    """A name of tessera/later.py, imported now and kept."""
    if name in MODULES:
        found: Any = import_module(MODULES[name])
    elif name in HOMES:
        found = getattr(import_module(HOMES[name]), RENAMED.get(name, name))
    else:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}{_elsewhere(name)}")
    globals()[name] = found
    return found


def _elsewhere(name: str) -> str:
    """Where a name of the array API standard is to be had that is another here."""
    other = None if name.startswith("_") else getattr(import_module("tessera.array_api"), name, None)
    if other is None:
        return ""
    known = next((k for k in __all__ if globals().get(k) is other), "")
    return f"; it is ts.{known}" if known else f"; tessera.array_api.{name} has the standard's name"


def __dir__() -> list[str]:
    return sorted({*globals(), *HOMES, *MODULES})


def _public(name: str) -> Any:
    """Whether a name is for users: modules are only those named here."""
    module = isinstance(globals().get(name), ModuleType) and name not in ("stable", *MODULES)
    return not (module or name.startswith("_") or name.isupper() or name in ("TYPE_CHECKING", "Any", "ModuleType"))


__all__ = [name for name in __dir__() if _public(name) and name not in ("import_module", "verify", "newaxis")]
