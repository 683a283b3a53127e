"""Forms: the arguments of ATen ops that rows do not take, each with the reason (what `supported` answers)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

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
    target: Any = node.target
    named = {a.name: a.default_value for a in target._schema.arguments if a.has_default_value()}
    named.update(zip((a.name for a in target._schema.arguments), node.args, strict=False))
    named.update(node.kwargs)
    values = {k: v.meta.get("val") if isinstance(v, Node) else v for k, v in named.items()}
    return FORMS[name](**values)


@refuses("as_strided.default", "as_strided_scatter.default")
def _(self: torch.Tensor, **rest: Any) -> str | None:
    if isinstance(self, torch.Tensor) and not self.is_contiguous():
        return "as_strided of a tensor that is not in row-major order: values have no strides"
    return None


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
