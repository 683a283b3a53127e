"""Linear layers: affine maps, embeddings, bilinear maps, and low-rank adaptation of a linear layer (LoRA)."""

from __future__ import annotations

import math
from typing import Any

from tessera.core.errors import ArgumentError, DTypeError, ShapeError, user_location
from tessera.core.types import f32, to_python_numbers
from tessera.ir.tensor import Tensor, as_tensor, wrap_array
from tessera.nn import initialisation as init
from tessera.nn.module import Module, Parameter
from tessera.ops.api.creation import zeros
from tessera.ops.tensor.basic import stop_gradient
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.elementwise import equal, greater, maximum, where
from tessera.ops.tensor.layers import BAG_MODES, bilinear, embedding_bag
from tessera.ops.tensor.nn import dropout
from tessera.ops.tensor.reduce import norm
from tessera.ops.tensor.shape import check_index, embedding, expand_dims, flatten, gather, permute, reshape


def check_count(name: str, value: Any, least: int = 1) -> int:
    """A size of a layer.

    Raises:
        ArgumentError: it is no integer, or less than `least`.
    """
    number = value if isinstance(value, bool) or not hasattr(value, "__index__") else int(value)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ArgumentError(f"{name} is {value!r}", location=user_location(), expected=f"an integer from {least} on")
    return number


def check_features(x: Tensor, size: int, what: str, axis: int = -1) -> Tensor:
    """An input whose axis has the size that a weight needs.

    Raises:
        ShapeError: it has another size, or no such axis.
    """
    if x.ndim < abs(axis) or x.shape[axis] != size:
        raise ShapeError(
            f"the input does not fit {what}", location=user_location(), expected=f"{size} features on axis {axis}",
            received=str(x.type),
        )  # fmt: skip
    return x


def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """x @ weightᵀ + bias, for a weight [out_features, in_features] as PyTorch has it (`ts.linear` takes [in, out]).

    >>> linear([[1.0, 2.0]], [[1.0, 10.0]])
    Tensor([[21.]], f32)
    """
    found = matmul(as_tensor(x), permute(as_tensor(weight), axes=(1, 0)))
    return found if bias is None else found + bias


class Identity(Module):
    """Returns its argument.

    >>> Identity()(3)
    3
    """

    def forward(self, x: Any) -> Any:
        """`x`."""
        return x


class Flatten(Module):
    """Joins the axes from `start_dim` to `end_dim`.

    >>> Flatten()(zeros((2, 3, 4))).shape
    (2, 12)
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        self.start_dim, self.end_dim = start_dim, end_dim

    def forward(self, x: Any) -> Tensor:
        """`x` [..., A, B, ...] as [..., A · B, ...]."""
        return flatten(as_tensor(x), self.start_dim, self.end_dim)


class Linear(Module):
    """An affine map: x @ weightᵀ + bias, with weight [out_features, in_features].

    The first values are those of PyTorch: uniform within 1 / sqrt(in_features).

    >>> Linear(3, 2)(zeros((4, 3))).shape
    (4, 2)
    """

    weight: Any
    bias: Any

    def __init__(self, in_features: int, out_features: int, bias: bool = True, dtype: Any = f32) -> None:
        self.in_features = check_count("in_features", in_features, 0)
        self.out_features = check_count("out_features", out_features, 0)
        self.weight = Parameter(init.kaiming_uniform((out_features, in_features), math.sqrt(5.0), dtype))
        self.bias = Parameter(init.bias_of(in_features, (out_features,), dtype)) if bias else None

    def forward(self, x: Any) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        x = check_features(as_tensor(x), self.in_features, f"a weight {list(self.weight.shape)}")
        return linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.in_features}, {self.out_features}" + ("" if self.bias is not None else ", bias=False")


class Bilinear(Module):
    """A bilinear map: x1ᵀ · weight[o] · x2 + bias[o], with weight [out_features, in1_features, in2_features].

    >>> Bilinear(2, 3, 4)(zeros((5, 2)), zeros((5, 3))).shape
    (5, 4)
    """

    def __init__(
        self, in1_features: int, in2_features: int, out_features: int, bias: bool = True, dtype: Any = f32
    ) -> None:
        sizes = (check_count("out_features", out_features), in1_features, in2_features)
        self.weight = Parameter(init.bias_of(check_count("in1_features", in1_features), sizes, dtype))
        self.bias = Parameter(init.bias_of(in1_features, (out_features,), dtype)) if bias else None

    def forward(self, x1: Any, x2: Any) -> Tensor:
        """[..., in1_features] and [..., in2_features] to [..., out_features]."""
        return bilinear(x1, x2, self.weight, self.bias)


class Unflatten(Module):
    """Splits axis `dim` into axes of the sizes `unflattened_size`, of which one may be -1.

    >>> Unflatten(1, (2, 3))(zeros((4, 6))).shape
    (4, 2, 3)
    """

    def __init__(self, dim: int, unflattened_size: Any) -> None:
        self.dim, self.unflattened_size = dim, tuple(unflattened_size)

    def forward(self, x: Any) -> Tensor:
        """`x` [..., A · B, ...] as [..., A, B, ...]."""
        x = as_tensor(x)
        at = self.dim + x.ndim if self.dim < 0 else self.dim
        if not 0 <= at < x.ndim:
            raise ShapeError(f"there is no axis {self.dim} to split", location=user_location(), received=str(x.type))
        sizes, whole = list(self.unflattened_size), x.shape[at]
        known = -math.prod(sizes) if -1 in sizes else math.prod(sizes)
        if (
            sizes.count(-1) > 1
            or min(sizes, default=1) < -1
            or known == 0
            or isinstance(whole, int)
            and (whole % known or (-1 not in sizes and whole != known))
        ):
            raise ShapeError(
                f"axis {self.dim} cannot be split into {self.unflattened_size}", location=user_location(),
                received=str(x.type), expected=f"sizes whose product is {whole}",
            )  # fmt: skip
        sizes = [whole // known if n == -1 else n for n in sizes]
        return reshape(x, shape=(*x.shape[:at], *sizes, *x.shape[at + 1 :]))


class Embedding(Module):
    """A table of vectors: rows of weight [num_embeddings, embedding_dim] by index; normal numbers at first.

    The row `padding_idx` begins as zeros and its gradient is 0. With `max_norm` the rows that a call looks up are first
    scaled down to that `norm_type`-norm, and stay so, as new values of the parameter. `scale_grad_by_freq` divides
    the gradient of a row by the number of its indices in the call.

    >>> Embedding(10, 4)(Tensor([1, 2])).shape
    (2, 4)
    """

    weight: Any

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False, dtype: Any = f32,
    ) -> None:  # fmt: skip
        self.num_embeddings = check_count("num_embeddings", num_embeddings)
        self.embedding_dim = check_count("embedding_dim", embedding_dim)
        if sparse:
            raise ArgumentError(
                "sparse gradients of an embedding", location=user_location(), expected="sparse=False",
                suggestion="leave it out: the gradient is a tensor of the shape of the weight",
            )  # fmt: skip
        max_norm = to_python_numbers(max_norm)
        if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm >= 0):
            raise ArgumentError(f"max_norm is {max_norm!r}", location=user_location(), expected="a number from 0 on")
        self.max_norm, self.norm_type, self.scale_grad_by_freq = max_norm, float(norm_type), scale_grad_by_freq
        self.renewed = () if max_norm is None else ("weight",)
        weight = init.normal((num_embeddings, embedding_dim), dtype=dtype)
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise ArgumentError(
                    f"padding_idx is {padding_idx}", location=user_location(), expected=f"below {num_embeddings}"
                )
            padding_idx %= num_embeddings
            weight = weight.at[padding_idx].set(0.0)
        self.padding_idx = padding_idx
        self.weight = Parameter(weight)

    def forward(self, indices: Any) -> Tensor:
        """Integers [...] to [..., embedding_dim].

        Raises:
            OutOfBoundsError: an index is out of range.
        """
        at = as_tensor(indices)
        if not at.dtype.is_integer:
            raise DTypeError(
                "an embedding takes integers", location=user_location(), expected="int32 or int64",
                received=str(at.type), suggestion="cast them: x.to(ts.int64)",
            )  # fmt: skip
        at = check_index(at, size=self.num_embeddings, along=0, what="token", wrap=False)
        if self.max_norm is not None:
            self._limit_rows(at)
        found = embedding(self.weight, at)
        if self.scale_grad_by_freq:
            share = gather(1.0 / maximum(self._count_rows(at), 1.0), at, axis=0)
            held = stop_gradient(found)
            found = held + (found - held) * expand_dims(share, -1)
        if self.padding_idx is None:
            return found
        padding = expand_dims(equal(at, self.padding_idx), -1)
        return where(padding, stop_gradient(found), found)

    def _limit_rows(self, at: Tensor) -> None:
        """Scale the rows at these indices down to the largest norm; derivatives take that as the identity (PyTorch)."""
        weight, flat = self.weight, reshape(at, shape=(-1,))
        held = stop_gradient(weight)
        rows = embedding(held, flat)
        size = norm(rows, self.norm_type, axis=-1, keepdims=True)
        new = held.at[flat].set(where(greater(size, self.max_norm), rows * (self.max_norm / (size + 1e-7)), rows))
        if weight.is_traced:
            self.weight = new + (weight - held)
            return
        self.weight = wrap_array(new.data, new.type)
        self.weight.requires_grad = weight.requires_grad

    def _count_rows(self, at: Tensor) -> Tensor:
        """How often each row is looked up."""
        flat = reshape(at, shape=(-1,))
        return zeros((self.num_embeddings,), dtype=self.weight.dtype).at[flat].add(1.0)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class EmbeddingBag(Module):
    """The mean, sum or maximum of the rows of a table for each bag of indices.

    A row of indices [bags, L] is a bag; of indices [N] a bag begins at each of `offsets`, which end with N where
    `include_last_offset` says so.

    >>> EmbeddingBag(10, 4)(Tensor([[1, 2], [3, 3]])).shape
    (2, 4)
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, mode: str = "mean", include_last_offset: bool = False,
        padding_idx: int | None = None, dtype: Any = f32,
    ) -> None:  # fmt: skip
        if mode not in BAG_MODES:
            raise ArgumentError(f"mode is {mode!r}", location=user_location(), expected=", ".join(BAG_MODES))
        table = Embedding(num_embeddings, embedding_dim, padding_idx, dtype=dtype)
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, table.padding_idx
        self.mode, self.include_last_offset = mode, include_last_offset
        self.weight = Parameter(table.weight)

    def forward(self, indices: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """Integers to [bags, embedding_dim]."""
        if offsets is not None and self.include_last_offset:
            offsets = as_tensor(offsets)[:-1]
        return embedding_bag(self.weight, indices, offsets, self.mode, per_sample_weights, self.padding_idx)

    def extra_repr(self) -> str:
        """The sizes."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"


class LoRA(Module):
    """Low-rank adaptation of a linear layer: its parameters are frozen, b @ a is trained (Hu et al. 2021).

    The result is base(x) + (x @ aᵀ @ bᵀ) · alpha / rank, with a [rank, in_features] and b [out_features, rank]. b
    begins as zeros, so that nothing changes at first.

    >>> adapted = LoRA(Linear(8, 8), rank=2)
    >>> [name for name, _ in adapted.named_parameters()]
    ['a', 'b', 'base.weight', 'base.bias']
    """

    a: Any
    b: Any

    def __init__(self, base: Linear, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0) -> None:
        if not isinstance(base, Linear):
            raise ArgumentError("LoRA adapts a Linear", location=user_location(), received=type(base).__name__)
        self.rank, self.alpha, self.p = check_count("rank", rank), float(alpha), dropout
        dtype = base.weight.dtype
        self.a = Parameter(init.kaiming_uniform((rank, base.in_features), math.sqrt(5.0), dtype))
        self.b = Parameter(zeros((base.out_features, rank), dtype=dtype))
        self.base = base
        base.freeze()

    def forward(self, x: Any) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        x = as_tensor(x)
        low = linear(linear(dropout(x, self.p, training=self.training), self.a), self.b)
        return self.base(x) + low * (self.alpha / self.rank)

    def merge(self) -> Linear:
        """A linear layer that computes the same, with the adaptation added to its weight."""
        merged = Linear(self.base.in_features, self.base.out_features, self.base.bias is not None)
        merged.weight = self.base.weight + (self.b @ self.a) * (self.alpha / self.rank)
        if self.base.bias is not None:
            merged.bias = self.base.bias
        return merged


def add_lora(module: Module, rank: int = 8, alpha: float = 16.0, names: tuple[str, ...] = ()) -> Module:
    """Freeze a model and put `LoRA` around its linear layers: all, or those whose last names are in `names`.

    >>> from tessera.nn.containers import Sequential
    >>> add_lora(Sequential(Linear(4, 4), Linear(4, 2)), rank=1).count_parameters()
    44

    Raises:
        ArgumentError: no layer has such a name.
    """
    module.freeze()
    found = 0
    for each in module.modules():
        for name, child in list(each._modules.items()):
            if type(child) is Linear and not isinstance(each, LoRA) and (not names or name in names):
                each._modules[name] = LoRA(child, rank, alpha)
                found += 1
    if not found:
        raise ArgumentError("there is no linear layer to adapt", location=user_location(), expected=", ".join(names))
    return module
