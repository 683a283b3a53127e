"""Kernel launches in traced functions: kernels of the standard library and of the tutorials under each transform."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case
from conformance.tile.groups import cases as groups
from conformance.tile.stdlib import cases as stdlib
from conformance.tile.tutorials import cases as tutorials
from tessera.core.errors import UnsupportedOpError
from tessera.frontend.jit.tracing import Jit

EXAMPLES = 2  # of a batch
# Kernels without a derivative, with what their error says.
NO_DERIVATIVE = {
    "stdlib/adam-f32": "reads `param`, which it writes",
    "stdlib/attention-cache-f32": "a loop whose trips have no known bound",
    "tutorials/layer-norm-backward-f32": "reads `dw`, which it writes",
    "tutorials/grouped-gemm": "ts.while",
}
GROUP_GRADIENTS = ("groups/block-sum-32", "groups/stretches-of-64-in-64")  # of kernels whose tiles communicate
CHECKPOINTED = ("stdlib/layernorm-f32", "stdlib/product-gelu-f32", "stdlib/attention-causal-f32")


@dataclass(frozen=True)
class LaunchedKernel:
    """A kernel's case: its arrays that a launch reads, and the memories that it writes."""

    kernel: Any
    grid: Any
    constants: Mapping[str, Any]
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]

    @staticmethod
    def of(case: Case) -> LaunchedKernel:
        """The launch of a kernel's case."""
        kernel, arguments = case.entry()
        arrays = {k: v for k, v in arguments.items() if isinstance(v, np.ndarray)}
        constants = {k: v for k, v in arguments.items() if k not in arrays}
        grid = case.grid if case.group is None else (case.grid, case.group)
        body = kernel[grid].module(**arguments).functions[1].body
        written = {n.args[0].hint for n in body.walk() if "write" in n.op.effects and n.args[0] in body.params}
        read = {n.args[0].hint for n in body.walk() if "read" in n.op.effects and n.args[0] in body.params}
        outputs = {k: v for k, v in arrays.items() if k in written - read}
        return LaunchedKernel(kernel, grid, constants, {k: v for k, v in arrays.items() if k not in outputs}, outputs)

    def launch(self, *inputs: Any) -> tuple[Any, ...]:
        """The written memories, for inputs in order."""
        memories = {k: ts.like(v) for k, v in self.outputs.items()}
        given = dict(zip(self.inputs, inputs, strict=True))
        found = ts.launch(self.kernel, self.grid, **given, **memories, **self.constants)
        return found if isinstance(found, tuple) else (found,)

    def add_up(self, *inputs: Any) -> Any:
        """A scalar that depends on every result, each element with a weight of its own."""
        floats = [y for y in self.launch(*inputs) if y.dtype.is_float]
        weights = [ts.reshape(ts.arange(y.size) % 7, shape=y.shape).to(y.dtype) - 2.5 for y in floats]
        return sum((y * w).sum() for y, w in zip(floats, weights, strict=True))


def scanned(each: LaunchedKernel) -> Callable[..., Any]:
    """A launch in each step of a loop."""

    def run(*inputs: Any) -> Any:
        step = lambda i, scale: (i + 1, each.launch(*(_scale(x, scale) for x in inputs)))  # noqa: E731
        return ts.scan(step, 0, ts.Tensor([1.0, 0.5]))

    return run


def _scale(x: Any, scale: Any) -> Any:
    return x * ts.cast(scale, dtype=x.dtype) if x.dtype.is_float else x


def cases() -> Iterator[Case]:
    """Each kernel in a jit function, a loop, a batch, and under reverse mode."""
    chosen = [*stdlib.cases(), *tutorials.cases(), *groups.cases()]
    for case in chosen:
        if case.rejects is None and not case.debug and not case.lines:
            yield from _make_cases(case.name.partition("/")[2], LaunchedKernel.of(case), case)


def _make_cases(name: str, each: LaunchedKernel, case: Case) -> Iterator[Case]:
    inputs = tuple(each.inputs.values())
    yield Case(f"graph/launches/jit/{name}", lambda: (Jit(each.launch), inputs), exact=case.exact)
    if "16" in name or "fp" in name:
        return
    if inputs:
        batch = tuple(np.stack([_vary(x, i) for i in range(EXAMPLES)]) for x in inputs)
        batched = lambda *xs: ts.vmap(each.launch)(*xs)  # noqa: E731
        yield Case(f"graph/launches/vmap/{name}", lambda: (Jit(batched), batch), exact=case.exact)
    if "stdlib" in name:
        yield Case(f"graph/launches/scan/{name}", lambda: (Jit(scanned(each)), inputs), exact=case.exact)
    if "groups" not in name or name in GROUP_GRADIENTS:
        yield from _make_gradient(name, each, inputs)


def _with_exact_scores(each: LaunchedKernel) -> tuple[LaunchedKernel, tuple[np.ndarray, ...]]:
    """The kernel on inputs whose scores need no rounding: which of them is the largest is then certain.

    The derivative of a maximum divides by the number of elements that equal it, of which nothing is known where
    rounding may make any equal or none (docs/error-bounds.md).
    """
    inputs = {
        k: (np.round(x.astype("f4") * 8) / 8).astype(x.dtype) if k in SCORED else x for k, x in each.inputs.items()
    }
    constants = {**each.constants, "scale": 0.25, **({"softcap": 0.0} if "softcap" in each.constants else {})}
    exact = replace(each, inputs=inputs, constants=constants)
    return exact, tuple(inputs.values())


SCORED = ("q", "k", "mask")


def _vary(x: np.ndarray, number: int) -> np.ndarray:
    """The array of one example of a batch."""
    return (x * x.dtype.type(1 - 0.25 * number)).astype(x.dtype) if x.dtype.kind in "fV" else x


def _make_gradient(name: str, each: LaunchedKernel, inputs: Sequence[np.ndarray]) -> Iterator[Case]:
    places = tuple(i for i, x in enumerate(inputs) if x.dtype.kind in "fV")
    if not places:
        return
    if "attention" in name and "scale" in each.constants:
        each, inputs = _with_exact_scores(each)
    gradient = Jit(lambda *xs: ts.grad(each.add_up, places)(*xs))
    refused = {"rejects": UnsupportedOpError, "says": (NO_DERIVATIVE[name],)} if name in NO_DERIVATIVE else {}
    yield Case(f"graph/launches/grad/{name}", lambda: (gradient, inputs), **refused)
    if name in CHECKPOINTED:
        kept = Jit(lambda *xs: ts.grad(ts.checkpoint(each.add_up), places)(*xs))
        yield Case(f"graph/launches/checkpoint/{name}", lambda: (kept, inputs))
