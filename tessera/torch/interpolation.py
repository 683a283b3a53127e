"""Interpolation whose backward pass is one op: PyTorch takes it apart before a backend sees it, and its gradient then
scatters each element that was read.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch.nn import functional

_AXES = {3: "1d", 4: "2d", 5: "3d"}
_NAMES = {
    "nearest": "upsample_nearest", "nearest-exact": "_upsample_nearest_exact", "linear": "upsample_linear",
    "bilinear": "upsample_bilinear", "trilinear": "upsample_trilinear", "bicubic": "upsample_bicubic",
}  # fmt: skip
_SIGNATURE = inspect.signature(functional.interpolate)


def rewrite_interpolations(module: torch.fx.GraphModule) -> None:
    """Replace the interpolations in a graph of TorchDynamo by calls whose backward pass is one op."""
    found = [n for n in module.graph.nodes if n.op == "call_function" and n.target is functional.interpolate]
    for node in found:
        node.target = interpolate
    if found:
        module.recompile()


def interpolate(*args: Any, **named: Any) -> torch.Tensor:
    """`torch.nn.functional.interpolate`, where it has a gradient with the backward op of ATen."""
    bound = _SIGNATURE.bind(*args, **named)
    bound.apply_defaults()
    given = bound.arguments
    x = given["input"]
    whole = functools.partial(functional.interpolate, *args, **named)
    if not (torch.is_grad_enabled() and x.requires_grad) or not _has_backward_op(given):
        return whole()
    scales = given["scale_factor"]
    listed = list(scales) if isinstance(scales, (list, tuple)) else [scales] * (x.ndim - 2)
    steps = [None] * (x.ndim - 2) if given["recompute_scale_factor"] else listed
    corners = [] if given["mode"].startswith("nearest") else [bool(given["align_corners"])]
    return _Interpolation.apply(x, given, (*corners, *steps))  # type: ignore[no-any-return, no-untyped-call]


def _has_backward_op(given: dict[str, Any]) -> bool:
    """Whether the arguments are those of an op of known sizes, of floats that autocast leaves as they are."""
    x = given["input"]
    plain = given["mode"] in _NAMES and not given["antialias"] and x.ndim in _AXES and x.is_floating_point()
    known = all(isinstance(n, int) for n in x.shape)
    transformed = torch._C._are_functorch_transforms_active()
    return plain and known and not transformed and not torch.is_autocast_enabled(x.device.type)


class _Interpolation(torch.autograd.Function):
    """An interpolation as PyTorch takes it apart, and the op of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, given: dict[str, Any], numbers: tuple[Any, ...]) -> torch.Tensor:
        ctx.op = getattr(torch.ops.aten, f"{_NAMES[given['mode']]}{_AXES[x.ndim]}_backward").default
        ctx.shape, ctx.numbers = list(x.shape), numbers
        return functional.interpolate(**{**given, "input": x})

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (g,) = gradients
        return ctx.op(g, list(g.shape[2:]), ctx.shape, *ctx.numbers), None, None
