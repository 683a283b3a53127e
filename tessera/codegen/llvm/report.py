"""Assertions and prints: blocks written to memory and handed to the runtime, which knows what they are.

    void @tessera_report(i64 context, i64 site, i64 program, ptr table)

`table` holds the address of each operand. `site` numbers the places of the text; the launch plan says what
stands there (`codegen/llvm/reports.py`). A program whose assertion fails ends there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera.codegen.blocks import sizes
from tessera.codegen.grouped.reports import report
from tessera.codegen.llvm.lane import Body, Lane
from tessera.codegen.llvm.memory import store
from tessera.codegen.llvm.nest import fill
from tessera.codegen.llvm.plan import is_block
from tessera.codegen.llvm.scratch import Memory, row_major
from tessera.codegen.llvm.visit import visit
from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node, Value
from tessera.ops import checks
from tessera.types import int64

if TYPE_CHECKING:
    from tessera.codegen.llvm.kernel import Kernel

NAME, CONTEXT = "tessera_report", "tessera_context"


@visit(report)
def _(kernel, node):
    text = kernel.text
    table = kernel.scratch.memory(int64, (len(node.args),), (1,))
    kernel.scratch.touch(table)
    held = [_held(kernel, v) for v in node.args]
    for place, memory in enumerate(held):
        kernel.scratch.touch(memory)
        slot = text.let(f"getelementptr i64, ptr {table.base}, i64 {place}", "p")
        text.line(f"store ptr {memory.base}, ptr {slot}, align 8")
    context = text.let(f"load i64, ptr @{CONTEXT}, align 8")
    site = kernel.library.site(_described(kernel, node))
    kernel.scratch.touch(table)
    text.line(f"call void @{NAME}(i64 {context}, i64 {site}, i64 {_number(kernel)}, ptr {table.base})")
    if node.attrs["kind"] != "print":  # the program ends here
        text.line("ret void")
        text.begin(text.new_label("unreached"))


def _held(kernel: Kernel, v: Value) -> Memory:
    """A value in memory, element after element."""
    shape = sizes(v.type)
    memory: Memory = kernel.scratch.memory(v.type.dtype, shape, row_major(shape))
    if is_block(v):
        fill(kernel, v, memory)
    else:
        store(Body(kernel), memory, (), Lane(kernel.scalars[v]))
    return memory


def _number(kernel: Kernel) -> str:
    """The program's number in row-major order."""
    text = kernel.text
    rows = text.let("mul i64 %pid0, %grid1", "i")
    row = text.let(f"add i64 {rows}, %pid1", "i")
    first = text.let(f"mul i64 {row}, %grid2", "i")
    return text.let(f"add i64 {first}, %pid2", "i")


def _described(kernel: Kernel, node: Node) -> dict[str, Any]:
    """A place of the text in words that JSON can hold."""
    attrs, loc = kernel.function.attrs, node.loc
    return {
        **node.attrs,
        "grid": [int(n) for n in attrs.get("grid", ())],
        "group": int(attrs.get("tiles", 1)),
        "place": [loc.file, loc.line, loc.column, loc.end_column],
        "operands": [{"shape": list(sizes(v.type)), "dtype": v.type.dtype.name} for v in node.args],
    }


@visit(checks.line)
def _(kernel, node):
    """Nothing: a place for a debugger to stop at, which compiled code has no use for."""


@visit(checks.pause)
def _(kernel, node):
    raise UnsupportedOpError(
        "the target llvm does not stop in a debugger", location=node.loc,
        suggestion='run this kernel with target="interp", or take breakpoint() out',
    )  # fmt: skip
