"""Calls on tensors: operators and methods of Tensor, from the op definitions, and eager dispatch, which caches for each
op and operand types a plan of conversions, attributes and result types."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tessera.core.device_array import DeviceArray
from tessera.core.errors import ArgumentError, TesseraError, user_location
from tessera.core.hooks import backpropagate, record_on_tape
from tessera.core.types import BY_NAME, DType, TensorType, Type, check_integer_fits, f32, tf32
from tessera.ir.builder import CURRENT_BUILDER, CURRENT_NUMERICS
from tessera.ir.numerics.conversion import convert
from tessera.ir.rules import ATTRIBUTE_ALIASES, COMPUTE, EAGER_CALL_HOOK, REGISTRY, STORAGE, Op, round_results
from tessera.ir.tensor import Tensor, get_elements, move, wrap_array
from tessera.ops.api.numpy_protocol import PROTOCOLS
from tessera.ops.api.subscript import IndexUpdateHelper, subscript
from tessera.ops.tensor import (
    contractions,
    logic,
    matrices,
    nn,
    rearrange,
    reduce,
    running_extremes,
    scalar_functions,
    scatter,
    shape,
    sorting,
)
from tessera.ops.tensor import elementwise as e
from tessera.ops.tensor.basic import broadcast_to, cast, coerce_plain
from tessera.ops.tensor.coercion import (
    PYTHON_NUMBERS,
    coerce_arithmetic,
    coerce_floating,
    coerce_pointwise,
    coerce_power,
    coerce_rounding,
    coerce_select,
    find_common_type,
)
from tessera.ops.tensor.contractions import coerce_dot, matmul
from tessera.ops.tensor.reduce import coerce_argreduce, coerce_mean, coerce_sum

TO_FLOATS = (coerce_floating, coerce_rounding, coerce_power)
MAX_PLANS = 1024  # plans for each op; then the cache is cleared, which limits the memory of programs with many shapes
Convert = Callable[[Any], Any]
PlanKey = tuple[Any, ...]


class EagerPlan:
    """A call with operands of these types: how each is converted, the attributes, and the types of the results."""

    __slots__ = ("array", "attrs", "conversions", "op", "numpy_result_type", "ref", "results", "type")

    def __init__(self, op: Op, converts: list[Convert | None], attrs: Mapping[str, Any], results: tuple[Type, ...]):
        self.op, self.ref, self.attrs, self.results = op, op.ref, dict(attrs), results
        # The place of an operand of a pointwise op that is an array: where that is one number in memory, the result is
        # one too, and not computed by the plan.
        self.array: int | None = None
        self.conversions = converts if any(converts) else None
        self.type = results[0] if len(results) == 1 else None
        # Most ops have one result, which is stored as NumPy returns it.
        self.numpy_result_type = (
            None if self.type is None or self.type.policy or self.type.dtype is tf32 else self.type.dtype.numpy
        )

    def run(self, operands: tuple[Any, ...]) -> Any:
        """The results for operands of the plan's types."""
        arrays = [x.data if x.__class__ is Tensor else x for x in operands]
        if self.conversions is not None:
            arrays = [a if c is None else c(a) for c, a in zip(self.conversions, arrays, strict=True)]
        with np.errstate(all="ignore"):
            out = self.ref(*arrays, **self.attrs)
            if self.numpy_result_type is not None and out.dtype is self.numpy_result_type:
                return wrap_array(out, self.type)  # type: ignore[arg-type]
            stored = round_results(out, self.results)
        tensors = tuple(wrap_array(a, t) for a, t in zip(stored, self.results, strict=True))  # type: ignore[arg-type]
        return tensors[0] if self.type is not None else tensors


def dispatch_eager_call(op: Op, args: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
    """The results of a call: by its cached plan, or by full dispatch, which caches a plan."""
    context = CURRENT_NUMERICS.get()
    if context is not None:
        return context.call(op, *op.split(args, attrs))
    if CURRENT_BUILDER.get() is not None or (key := _make_plan_key(args, attrs)) is None:
        return op.coerce(op, *op.split(args, attrs))
    plan = op.plans.get(key)
    if plan is None:
        return _call_and_plan(op, key, args, attrs)
    if plan.array is not None and not any(args[plan.array].data.strides):
        return op.coerce(op, *op.split(args, attrs))
    try:
        return plan.run(args)
    except TesseraError as error:
        raise error.at(user_location()) from None
    except (TypeError, AttributeError):
        _check_live_tensors(args)
        raise


def _make_plan_key(args: tuple[Any, ...], attrs: dict[str, Any]) -> PlanKey | None:
    """The key of a plan; None for calls without one: they need gradients, or an attribute is not hashable."""
    kinds: list[Any] = []
    for x in args:
        if x.__class__ is Tensor:
            if x.requires_grad or x.data.__class__ is not np.ndarray:
                return None  # also what lies on a device, or was donated
            kinds.append(x.type)
        else:
            kinds.append(x.__class__)
    for value in attrs.values():
        if value.__class__ is float and value == 0.0:
            kinds.append(math.copysign(1.0, value))  # 0.0 equals -0.0
    key = (*kinds, *attrs.items()) if attrs else tuple(kinds)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _check_live_tensors(args: tuple[Any, ...]) -> None:
    """Refuse an operand of a finished trace: it has no elements."""
    for x in args:
        if x.__class__ is Tensor:
            x.numpy()


def _call_and_plan(op: Op, key: PlanKey, args: tuple[Any, ...], attrs: dict[str, Any]) -> Any:
    operands, attributes = op.split(args, attrs)
    out = op.coerce(op, operands, attributes)
    planner = PLANNERS.get(op.coerce)
    plainly = all(_is_uncompensated(x) for x in args)
    if planner is not None and plainly and len(args) == len(op.operands) and not op.effects:
        results = tuple(t.type for t in out) if isinstance(out, tuple) else (out.type,)
        if len(op.plans) >= MAX_PLANS:
            op.plans.clear()
        if (plan := planner(op, operands, attributes, results)) is not None:
            plan.array = next(
                (i for i, x in enumerate(args) if op.pointwise and isinstance(x, Tensor) and x.ndim), None
            )
            op.plans[key] = plan
    return out


def _is_uncompensated(x: Any) -> bool:
    """Whether an operand is a tensor or number without a policy that replaces the op (compensated sums)."""
    return x.__class__ in PYTHON_NUMBERS or (
        x.__class__ is Tensor and not (x.type.policy and x.type.policy.compensated)
    )


def _make_plan(
    op: Op, types: list[TensorType], steps: list[list[Convert]], attrs: Any, results: tuple[Type, ...]
) -> EagerPlan:
    if op.numerics != STORAGE:
        for type, each in zip(types, steps, strict=True):
            wide = type.compute if op.numerics == COMPUTE else type.accumulate
            each += [] if wide.numpy == type.dtype.numpy else [_make_conversion(wide)]
    if op.canonical is not None:
        attrs = op.canonical(*types, **attrs)
    return EagerPlan(op, [_compose_conversions(each) for each in steps], attrs, results)


def _plan_unconverted(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    if not all(isinstance(x, Tensor) for x in operands):
        return None
    return _make_plan(op, [x.type for x in operands], [[] for _ in operands], attrs, results)


def _plan_matmul(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    vectors = any(not isinstance(x, Tensor) or x.ndim < 2 for x in operands)
    return None if vectors else _plan_unconverted(op, operands, attrs, results)


def _plan_pointwise(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    """Conversions of a pointwise call: NumPy broadcasts by the same rules, so only element types change."""
    element = find_common_type(operands)
    if op.coerce in TO_FLOATS and not element.dtype.is_float:
        element = TensorType((), f32)
    types = [x.type if isinstance(x, Tensor) else element for x in operands]
    steps: list[list[Convert]] = [
        [] if isinstance(x, Tensor) and x.dtype == element.dtype else [_make_conversion(element.dtype, x)]
        for x in operands
    ]
    types = [t if t.dtype == element.dtype else t.with_dtype(element.dtype) for t in types]
    return _make_plan(op, types, steps, attrs, results)


def _plan_arithmetic(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    """As `_plan_pointwise`; bools take the general path."""
    bools = find_common_type(operands).dtype.kind == "bool"
    return None if bools else _plan_pointwise(op, operands, attrs, results)


def _plan_float_pointwise(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    """As `_pointwise`; integers take the general path."""
    return _plan_pointwise(op, operands, attrs, results) if results[0].dtype.is_float else None


def _plan_mean(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    bools = isinstance(operands[0], Tensor) and operands[0].dtype.kind == "bool"
    return None if bools else _plan_unconverted(op, operands, attrs, results)


def _plan_search(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    return None if attrs["axis"] is None or not operands[0].ndim else _plan_unconverted(op, operands, attrs, results)


def _plan_select(op: Op, operands: list[Any], attrs: Any, results: tuple[Type, ...]) -> EagerPlan | None:
    branches = _plan_pointwise(op, operands[1:], attrs, results)
    if branches is not None and isinstance(operands[0], Tensor):
        branches.conversions = [None, *(branches.conversions or [None, None])]
        return branches
    return None


def _make_conversion(dtype: DType, operand: Any = None) -> Convert:
    if operand is not None and operand.__class__ in PYTHON_NUMBERS:
        return lambda number: convert(np.asarray(check_integer_fits(number, dtype)), dtype)
    return lambda array: convert(array, dtype)


def _compose_conversions(steps: list[Convert]) -> Convert | None:
    if len(steps) < 2:
        return steps[0] if steps else None
    first, second = steps
    return lambda array: second(first(array))


PLANNERS: dict[Any, Callable[..., EagerPlan | None]] = {
    coerce_plain: _plan_unconverted,
    coerce_arithmetic: _plan_arithmetic,
    coerce_pointwise: _plan_pointwise,
    coerce_floating: _plan_pointwise,
}
PLANNERS[coerce_select] = _plan_select
PLANNERS[coerce_rounding] = PLANNERS[coerce_power] = _plan_float_pointwise
PLANNERS[coerce_argreduce] = _plan_search
PLANNERS[coerce_sum] = _plan_unconverted
PLANNERS[coerce_mean] = _plan_mean
PLANNERS[coerce_dot] = _plan_matmul
EAGER_CALL_HOOK.append(dispatch_eager_call)


OPERATORS: dict[str, Callable[..., Any]] = {
    "add": e.add,
    "sub": e.sub,
    "mul": e.mul,
    "truediv": e.div,
    "floordiv": e.floor_divide,
    "mod": e.remainder,
    "pow": e.pow,
    "matmul": matmul,
    "and": e.bitwise_and,
    "or": e.bitwise_or,
    "xor": e.bitwise_xor,
    "lshift": e.shift_left,
    "rshift": e.shift_right,
}
COMPARISON_OPERATORS = {
    "lt": e.less, "le": e.less_equal, "gt": e.greater, "ge": e.greater_equal, "eq": e.equal, "ne": e.not_equal,
}  # fmt: skip
ARRAY_LIKE = (Tensor, list, tuple, np.ndarray, np.generic)
UNARY_OPERATORS = {"neg": e.neg, "abs": e.abs, "invert": e.bitwise_not}
# The ops with `method=True` are methods too.
METHODS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        reduce.sum,
        reduce.mean,
        reduce.max,
        reduce.min,
        reduce.var,
        reduce.argmax,
        reduce.argmin,
        reduce.prod,
        reduce.any,
        reduce.all,
        reduce.std,
        reduce.logsumexp,
        reduce.norm,
        scalar_functions.clip,
        nn.softmax,
        nn.log_softmax,
        nn.relu,
        nn.gelu,
        nn.silu,
        scalar_functions.sigmoid,
        shape.transpose,
        shape.flatten,
        shape.squeeze,
        shape.gather,
        rearrange.flip,
        rearrange.roll,
        rearrange.repeat,
        rearrange.split,
        rearrange.unbind,
        matrices.moveaxis,
        rearrange.tril,
        rearrange.triu,
        matmul,
        sorting.sort,
        sorting.argsort,
        sorting.topk,
        reduce.cumsum,
        reduce.cumprod,
        running_extremes.cummax,
        running_extremes.cummin,
        rearrange.chunk,
        logic.isclose,
        logic.allclose,
        logic.count_nonzero,
        logic.logical_not,
        matrices.diagonal,
        matrices.trace,
        matrices.swapaxes,
        sorting.take,
        sorting.masked_fill,
        sorting.index_add,
        sorting.nonzero,
        scatter.scatter,
        scatter.scatter_add,
    )
}
METHODS |= {o.__name__: o for o in REGISTRY.values() if o.method}
METHODS |= {
    "unsqueeze": shape.expand_dims,
    "tile": rearrange.tiled,
    "dot": contractions.vecdot,
    "clamp": scalar_functions.clip,
    "eq": e.equal,
    "ne": e.not_equal,
    "lt": e.less,
    "le": e.less_equal,
    "gt": e.greater,
    "ge": e.greater_equal,
}


def _reflect_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(other, self)


def _make_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a method that accepts the other spellings of attributes (`dim`); ops do so themselves."""
    if isinstance(function, Op):
        return lambda self, *args, **named: function(self, *args, **named)
    known = inspect.signature(function).parameters
    other = {k: v for k, v in ATTRIBUTE_ALIASES.items() if v in known and k not in known}

    def method(self: Tensor, *args: Any, **named: Any) -> Any:
        return function(self, *args, **{other.get(k, k): v for k, v in named.items()})

    return method


def _make_equality(function: Callable[..., Any]) -> Callable[..., Any]:
    """`==` and `!=`; a tensor is not equal to None, text and other objects, by Python's default."""

    def method(self: Tensor, other: Any) -> Any:
        if other.__class__ in PYTHON_NUMBERS or isinstance(other, ARRAY_LIKE) or hasattr(other, "__array__"):
            return function(self, other)
        return NotImplemented

    return method


def _reshape(self: Tensor, *sizes: Any) -> Tensor:
    """The same elements with another shape, given as one tuple or as sizes."""
    return shape.reshape(self, shape=sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes)


def _permute(self: Tensor, *dims: Any) -> Tensor:
    """The axes in another order, given as one tuple or as axes."""
    return shape.permute(self, axes=dims[0] if len(dims) == 1 and isinstance(dims[0], (tuple, list)) else dims)


def _to(self: Tensor, target: Any = None, dtype: Any = None, device: str | None = None) -> Tensor:
    """The tensor with another element type, on another device, or both; `x.to(ts.f16)`, `x.to("cuda:0")`.

    The elements are copied where they lie in another memory; `x.to(y.device)` brings two tensors together.

    Raises:
        DeviceUnavailable: the device is not available.
    """
    if isinstance(target, str) and target not in BY_NAME:
        target, device = None, target
    wanted = dtype if target is None else target
    out = self if wanted is None else cast(self, dtype=wanted)
    return out if device is None else move(out, device)


def _cpu(self: Tensor) -> Tensor:
    """The tensor in host memory: itself, or a copy of one on a device."""
    return move(self, "cpu")


def _cuda(self: Tensor, index: int = 0) -> Tensor:
    """The tensor on a GPU.

    Raises:
        DeviceUnavailable: there is none.
    """
    return _to(self, device=f"cuda:{index}")


def _to_device(self: Tensor, device: str, /, *, stream: Any = None) -> Tensor:
    """The tensor on another device, as the array API standard spells it."""
    return _to(self, device=device)


def _detach(self: Tensor) -> Tensor:
    """The same elements, without `requires_grad`."""
    return wrap_array(get_elements(self), self.type) if not self.is_traced else Tensor(self.data)


def _clone(self: Tensor) -> Tensor:
    """A copy of the elements; in a trace another tensor of the same value, since values are immutable."""
    if self.data.__class__ is DeviceArray:
        out = wrap_array(self.data.memory.clone(self.data, self.data.stream), self.type)
    else:
        out = Tensor(self.data) if self.is_traced else wrap_array(self.numpy().copy(), self.type)
    if self.requires_grad:  # gradients pass through a copy
        record_on_tape(cast, [self], {"dtype": self.dtype}, [out])
    return out


def _divmod(self: Tensor, other: Any) -> tuple[Tensor, Tensor]:
    return e.floor_divide(self, other), e.remainder(self, other)


def _backward(self: Tensor, gradient: Any = None) -> None:
    """Add the gradient of this tensor to `grad` of each tensor made with `requires_grad=True`.

    `gradient` is the cotangent of this tensor; a scalar needs none. Repeated calls accumulate.

    >>> x = Tensor([1.0, 2.0], requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad
    Tensor([2., 4.], f32)

    Raises:
        ArgumentError: the tensor does not depend on a tensor with `requires_grad=True`.
        ShapeError: it is not a scalar and there is no `gradient`, or one of another shape.
    """
    backpropagate(self, gradient)


def _contiguous(self: Tensor) -> Tensor:
    """The tensor in row-major order; itself if it already is."""
    return self if self.is_traced or self.data.flags.c_contiguous else wrap_array(self.data.copy("C"), self.type)


def _expand(self: Tensor, *sizes: Any) -> Tensor:
    """The tensor broadcast to a shape, given as one tuple or as sizes; -1 keeps the size of an axis."""
    wanted = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    kept = (1,) * (len(wanted) - self.ndim) + tuple(self.shape)
    return broadcast_to(self, shape=tuple(k if w == -1 else w for w, k in zip(wanted, kept, strict=False)))


def _repeat(self: Tensor, repeats: Any, axis: Any = None, *more: Any) -> Tensor:
    """As `ts.repeat`: each element in a row. PyTorch's method of this name repeats the whole tensor."""
    counts = (repeats, axis, *more)
    try:
        if more:
            raise ArgumentError("repeat takes a count and an axis", location=user_location(), received=repr(counts))
        return rearrange.repeat(self, repeats, axis)
    except TesseraError as error:
        whole = counts if axis is not None else repeats
        error.suggestion = error.suggestion or f"to repeat the whole tensor, as PyTorch does: x.tile({whole!r})"
        raise


# Methods of PyTorch's tensors, and what to write instead: for the error of a name that is not here.
_ELEMENT_TYPES = {
    "float": "f32", "double": "f64", "half": "f16", "bfloat16": "bf16", "int": "int32", "long": "int64",
    "short": "int16", "byte": "uint8", "char": "int8", "bool": "bool",
}  # fmt: skip
SPELLINGS = {
    **{name: f"x.to(ts.{own})" for name, own in _ELEMENT_TYPES.items()},
    **dict.fromkeys(("fill_", "zero_", "copy_"), "x = ...: tensors do not change in place"),
    **dict.fromkeys(("cat", "concatenate"), "ts.concatenate([x, y])"),
    **dict.fromkeys(("mm", "bmm"), "x @ y"),
    **{name: f"ts.{name}(x, y)" for name in ("outer", "stack", "where")},
    **{name: f"ts.{name}(x)" for name in ("diag", "ones_like", "unique", "zeros_like")},
    "dim": "x.ndim",
    "element_size": "x.dtype.bits // 8",
    "expand_as": "x.expand(y.shape)",
    "index_select": "x.take(index, axis)",
    "is_cuda": "x.device",
    "new_zeros": "ts.zeros(shape, dtype=x.dtype)",
    "numel": "x.size",
    "repeat_interleave": "x.repeat(count, axis)",
    "register_hook": "ts.custom_vjp",
    "requires_grad_": "ts.tensor(data, requires_grad=True)",
    "t": "x.T",
}


def _missing_attribute(self: Tensor, name: str) -> Any:
    """Explain an attribute that tensors do not have."""
    plain = name.removesuffix("_")
    hint = SPELLINGS.get(name)
    if hint is None and plain != name and hasattr(Tensor, plain):
        hint = f"x = x.{plain}(...): tensors do not change in place"
    raise AttributeError(f"a tensor has no {name!r}" + (f"; write {hint}" if hint else ""), name=name, obj=self)


def attach_methods() -> None:
    """Give Tensor its operators and methods."""
    for name, function in OPERATORS.items():
        setattr(Tensor, f"__{name}__", _make_method(function))
        setattr(Tensor, f"__r{name}__", _reflect_operator(function))
    for name, function in (COMPARISON_OPERATORS | UNARY_OPERATORS).items():
        setattr(Tensor, f"__{name}__", (_make_equality if name in ("eq", "ne") else _make_method)(function))
    for name, function in METHODS.items():
        method = _make_method(function)
        method.__doc__ = function.__doc__
        setattr(Tensor, name, method)
    extra: dict[str, Any] = {
        "reshape": _reshape,
        "view": _reshape,
        "expand": _expand,
        "__getattr__": _missing_attribute,
        "permute": _permute,
        "repeat": _repeat,
        "to": _to,
        "astype": _to,
        "cpu": _cpu,
        "cuda": _cuda,
        "to_device": _to_device,
        "backward": _backward,
        "contiguous": _contiguous,
        "detach": _detach,
        "clone": _clone,
        "at": property(IndexUpdateHelper),
        "__pos__": _make_method(scalar_functions.positive),
        "__divmod__": _make_method(_divmod),
        "__getitem__": subscript,
        "T": property(shape.transpose),
        "mT": property(shape.transpose),
        **PROTOCOLS,
    }
    for name, method in extra.items():
        setattr(Tensor, name, method)
