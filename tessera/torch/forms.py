"""Forms: the arguments of ATen ops that rows do not take, each with the reason (what `supported` answers)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

Form = Callable[..., str | None]
FORMS: dict[str, Form] = {}
"""For the name of an op a function of its arguments, tensors by their types: the reason why not, or None."""


def refuses(*names: str) -> Callable[[Form], Form]:
    """Decorate the check of these ops' arguments, which it takes by the names of the schema."""

    def enter(check: Form) -> Form:
        FORMS.update({f"aten.{name}": check for name in names})
        return check

    return enter


def find_form_error(node: Node, name: str) -> str | None:
    """The reason why the row of an op does not take the arguments of a node; None if it does."""
    if name not in FORMS:
        return None
    args, named = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    return FORMS[name](**bind_by_name(node.target, args, named))


def bind_by_name(op: Any, args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names of the op's schema, with its defaults."""
    arguments = op._schema.arguments
    found = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**found, **dict(zip((a.name for a in arguments), args, strict=False)), **named}


@refuses("as_strided.default", "as_strided_copy.default", "as_strided_scatter.default")
def _(self: torch.Tensor, **rest: Any) -> str | None:
    if isinstance(self, torch.Tensor) and not (self.is_contiguous() and owns_memory(self)):
        return "as_strided of a view, or of a tensor that is not in row-major order: values have no strides"
    return None


def owns_memory(x: torch.Tensor) -> bool:
    """Whether the memory of a dense tensor has its elements alone."""
    size: int = x.untyped_storage().nbytes()
    return x.storage_offset() == 0 and size == x.numel() * x.element_size()


@refuses("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def _(self: Any, **rest: Any) -> str | None:
    return None if self.dtype.is_floating_point else f"a mean of windows of {self.dtype}"


@refuses(
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_flash_attention_for_cpu_backward.default",
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_backward.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_efficient_attention_backward.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_cudnn_attention_backward.default",
    "_scaled_dot_product_attention_math.default",
    "scaled_dot_product_attention.default",
)
def _(dropout_p: float = 0.0, **rest: Any) -> str | None:
    return f"attention with dropout ({dropout_p}): the elements that PyTorch drops are its own" if dropout_p else None


@refuses("batch_norm.default", "native_batch_norm.default", "_native_batch_norm_legit.default")
def _(running_mean: Any, training: bool, **rest: Any) -> str | None:
    return "it writes its running statistics in place" if training and running_mean is not None else None


@refuses("instance_norm.default")
def _(running_mean: Any, use_input_stats: bool, **rest: Any) -> str | None:
    return None if running_mean is None and use_input_stats else "it writes its running statistics in place"


@refuses("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")
def _(dropout: float, train: bool, num_layers: int, **rest: Any) -> str | None:
    return "dropout between recurrent layers" if dropout and train and num_layers > 1 else None


@refuses("pad.default")
def _(mode: str = "constant", **rest: Any) -> str | None:
    return None if mode in ("constant", "reflect", "replicate") else f"padding of mode {mode}"


@refuses("cross_entropy_loss.default")
def _(self: Any, target: Any, label_smoothing: float = 0.0, **rest: Any) -> str | None:
    plain = not label_smoothing and not target.dtype.is_floating_point
    return None if plain else "cross entropy with probabilities or smoothed labels"


@refuses("index.Tensor", "_unsafe_index.Tensor")
def _(indices: Sequence[Any], **rest: Any) -> str | None:
    if any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return "an index by a mask: the size of its result depends on values; use torch.where"
    return None


@refuses("index_put.default", "_unsafe_index_put.default")
def _(self: Any, indices: Sequence[Any], values: Any, **rest: Any) -> str | None:
    masks = [i for i in indices if isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8)]
    if not masks:
        return None
    before = next(n for n, i in enumerate(indices) if i is not None)
    trailing = self.ndim - before - masks[0].ndim
    single = values.ndim <= trailing or (values.ndim == trailing + 1 and values.shape[0] == 1)
    if before or len(masks) > 1 or sum(i is not None for i in indices) > 1 or not single:
        return "a put by a mask of more than one value: how many it takes depends on values; use torch.where"
    return None


@refuses("sym_is_contiguous.default")
def _(self: Any, memory_format: Any = torch.contiguous_format, **rest: Any) -> str | None:
    row_major = memory_format in (0, torch.contiguous_format)  # a schema's default is the number
    if row_major and (not isinstance(self, torch.Tensor) or self.is_contiguous()):
        return None
    return "an order of memory other than row-major, which values do not have"


@refuses("repeat_interleave.Tensor")
def _(output_size: Any = None, **rest: Any) -> str | None:
    return "the size of its result depends on values; give output_size" if output_size is None else None


@refuses("_linalg_eigh.default")
def _(UPLO: str = "L", compute_v: bool = True, **rest: Any) -> str | None:
    return "eigenvectors of the upper triangle, whose signs are PyTorch's own" if compute_v and UPLO != "L" else None


@refuses("_linalg_svd.default")
def _(A: Any, full_matrices: bool = False, compute_uv: bool = True, **rest: Any) -> str | None:
    whole = full_matrices and compute_uv and A.shape[-1] != A.shape[-2]
    return "full singular vectors: use full_matrices=False" if whole else None
