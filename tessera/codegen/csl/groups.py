"""Groups of tiles on an element: one program does each op for all of them before the next begins."""

from __future__ import annotations

from tessera.codegen.csl.blocks import emit
from tessera.codegen.csl.faults import failure, stop
from tessera.codegen.csl.kernels import is_kernel
from tessera.codegen.grouped import ungroup
from tessera.codegen.grouped.reports import report
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Module

EXPECTED = {
    "assert": "a condition that holds for every element of every program",
    "deadlock": "as many arrivals, and bytes, as the phase of an mbarrier takes",
}


def together(module: Module) -> Module:
    """A kernel whose groups are one program each: their tiles are the leading axis of every block that differs."""
    return ungroup(module) if is_kernel(module) else module


@emit(report)
def _(element, node, *operands):
    kind, text = node.attrs["kind"], node.attrs["text"]
    if kind not in EXPECTED:
        raise UnsupportedOpError(
            "tile.print cannot be emitted for csl: an element has nowhere to print to", location=node.loc,
            suggestion="run this on another target, or in the interpreter",
        )  # fmt: skip
    said = f"assertion failed: {text}".removesuffix(": ") if kind == "assert" else text
    stop(element, failure(element, node, kind, said, EXPECTED[kind]))
