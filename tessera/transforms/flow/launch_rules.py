"""Derivative rules of kernels: `@kernel.vjp` and `@kernel.jvp` around a launch in a traced function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.frontend.kernel.kernel_function import DerivativeFunction, Kernel, KernelCall
from tessera.ir.tensor import Tensor
from tessera.transforms.autodiff.call_primitives import custom_vjp, must_record_call, record_call
from tessera.transforms.autodiff.custom_rules import CustomVjpRule, check_cotangent

Names = tuple[list[str], list[str]]


def bind_ruled_launch(
    bind: Callable[[Sequence[Tensor]], list[Tensor]], operands: Sequence[Tensor], names: Names, call: KernelCall,
    kernel: Kernel,
) -> list[Tensor]:  # fmt: skip
    """The results of a launch, with the derivative rules of its kernel; `names` are those of operands and results."""
    if not must_record_call(operands):
        return bind(operands)
    rules, (given, written), count = kernel.rules, names, len(operands)

    def see(tensors: Sequence[Tensor]) -> KernelCall:
        inputs = dict(zip(given, tensors[:count], strict=True))
        return replace(call, inputs=inputs, outputs=dict(zip(written, tensors[count:], strict=True)))

    def forward(xs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        outs = bind(xs)
        return outs, [*xs, *outs]

    def backward(saved: Sequence[Tensor], g: Sequence[Tensor]) -> list[Tensor]:
        seen, left = see(saved), iter(g)
        cotangents = {n: next(left) for n, x in seen.outputs.items() if x.dtype.is_float}
        return _apply(rules.vjp, kernel, replace(seen, cotangents=cotangents), seen.inputs)

    def push(primals: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        outs = bind(primals)
        seen, pairs = see([*primals, *outs]), zip(given, tangents, strict=True)
        moved = {n: t for n, t in pairs if seen.inputs[n].dtype.is_float}
        return outs, _apply(rules.jvp, kernel, replace(seen, tangents=moved), seen.outputs)

    rule = CustomVjpRule(
        kernel.parameters.name, count, forward, rules.vjp and backward, rules.jvp and push, derives=True
    )
    return record_call(custom_vjp, bind, operands, rule=rule)


def _apply(
    rule: DerivativeFunction | None, kernel: Kernel, call: KernelCall, wanted: Mapping[str, Tensor]
) -> list[Tensor]:
    """What a rule returns for each of the wanted tensors; zero where it returns nothing.

    Raises:
        ArgumentError: the rule returns no dict of their names.
    """
    assert rule is not None
    found: Any = rule(call)
    unknown = sorted(found.keys() - wanted.keys()) if isinstance(found, Mapping) else [type(found).__name__]
    if unknown:
        raise ArgumentError(
            f"the derivative rule of {kernel.parameters.name} returns something else than tensors by name",
            location=user_location(), expected=f"a dict with keys among {', '.join(wanted)}",
            received=", ".join(unknown),
        )  # fmt: skip
    return [check_cotangent(found.get(n), x) for n, x in wanted.items()]
