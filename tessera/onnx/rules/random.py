"""Random operators: numbers of Tessera's counter-based generators."""

from __future__ import annotations

from typing import Any

from tessera.core.types import DType, f32
from tessera.ir.tensor import Tensor
from tessera.onnx.element_types import find_element
from tessera.onnx.node_rules import NodeCall, rule
from tessera.ops.tensor import random as draw
from tessera.ops.tensor.basic import cast


def _draw(call: NodeCall, shape: tuple[Any, ...], dtype: DType) -> Tensor:
    generator = _make_generator(call)
    if call.operator.startswith("RandomNormal"):
        found = draw.randn(shape, generator=generator) * call.attr("scale") + call.attr("mean")
    else:
        low, high = call.attr("low"), call.attr("high")
        found = draw.rand(shape, generator=generator) * (high - low) + low
    return found if dtype == f32 else cast(found, dtype=dtype)


def _make_generator(call: NodeCall) -> Any:
    """A generator of the node's own for a node with a seed: the same numbers in each run."""
    seed = call.attr("seed", None)
    return None if seed is None else draw.Generator(int(seed))


@rule("RandomNormal", "RandomUniform", foldable=False)
def _(call: NodeCall) -> Tensor:
    return _draw(call, tuple(call.attr("shape")), find_element(call.attr("dtype"), call.operator))


@rule("RandomNormalLike", "RandomUniformLike", foldable=False)
def _(call: NodeCall, x: Tensor) -> Tensor:
    wanted = call.attr("dtype", None)
    return _draw(call, x.shape, x.dtype if wanted is None else find_element(wanted, call.operator))


@rule("Bernoulli", foldable=False)
def _(call: NodeCall, x: Tensor) -> Tensor:
    wanted = call.attr("dtype", None)
    found = draw.bernoulli(x if x.dtype == f32 else cast(x, dtype=f32), generator=_make_generator(call))
    return cast(found, dtype=x.dtype if wanted is None else find_element(wanted, call.operator))


@rule("Multinomial", foldable=False)
def _(call: NodeCall, x: Tensor) -> Tensor:
    raise call.refuse("drawing from a multinomial distribution")
