"""Reverse mode of attention: its gradients as one op, which needs the sums of each row and no weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tessera.ir.rewrite import lower_node
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.attention import scaled_dot_product_attention
from tessera.ops.tensor.attention_gradients import attention_gradients, attention_with_sums
from tessera.transforms.autodiff.call_primitives import add_transpose_call
from tessera.transforms.autodiff.linearisation import Dual, call_jvp_rules


@call_jvp_rules(scaled_dot_product_attention)
def _(node: Any, duals: list[Dual], walk: Any, reverse: bool) -> Sequence[Dual]:
    q, k, v, *mask = primals = [d.primal for d in duals]
    # Derivatives by a mask, capped scores and no keys are left to the derivatives of the lowering.
    by_mask = any(d.tangent is not None for d in duals[3:])
    if not reverse or by_mask or node.attrs["softcap"] or 0 in (*q.shape, *k.shape):
        return walk(lower_node(node), *duals)  # type: ignore[no-any-return]
    attrs = {name: node.attrs[name] for name in ("causal", "scale", "weights", "window")}
    out, sums = attention_with_sums(*primals, **attrs)
    moves = [d.tangent is not None for d in duals[:3]]

    def pull(residuals: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        found = attention_gradients(*residuals[:5], *g, *residuals[5:], **attrs)
        return [x for x, moved in zip(found, moves, strict=True) if moved]

    return add_transpose_call(pull, [q, k, v, out, sums, *mask], duals, [out])
