"""Program ops: ids, allocations, the grid barrier, and the reports of assertions and prints.

    void @tessera_meet(i64 context)
    void @tessera_report(i64 context, i64 site, i64 program, ptr table)
    void @tessera_poll(ptr word)

The stop word @tessera_failure of a text is NO_FAILURE while a launch runs undisturbed. Programs read it in each
iteration of a loop, between programs and after a barrier; where it is another number they call @tessera_poll, which may
change it, and end if it is below FIRST_KEY.

The grid barrier calls the runtime, which runs every program of a cooperative launch in a thread of its own; `context`
is the word @tessera_meeting of the text, set before the launch. When a program has ended, so that the barrier cannot
complete, the stop word becomes BARRIER_BROKEN. A report stores its operands and passes
`table`, their addresses; `site` is the number of the report in the host plan. A failed assertion ends its program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tessera.codegen.diagnostics import describe_location
from tessera.codegen.grouped.diagnostics import report_op
from tessera.codegen.legality import static_shape
from tessera.codegen.llvm.passes.bufferisation import is_block
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import materialise_block
from tessera.codegen.llvm.text.builder import LaneValue, LoopBody
from tessera.codegen.llvm.text.memory import StridedMemRef, make_row_major_strides, store_lane
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import int64
from tessera.ir.core import Node, Value
from tessera.ops.dialects import tile

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


# The stop word: whether programs go on.

FAILURE_WORD, POLL_FUNCTION = "tessera_failure", "tessera_poll"
# The values of the word, as unsigned numbers; those between are keys of failures, which end no program that runs.
INTERRUPTED, BARRIER_BROKEN, FIRST_KEY = 0, 1, 1 << 20
PENDING, NO_FAILURE = -2, -1
MAX_UNCHECKED_ITERATIONS = 1024


def emit_stop_check(kernel: LlvmKernelContext) -> None:
    """End the program if its launch is interrupted."""
    text = kernel.text
    word = text.let(f"load volatile i64, ptr @{FAILURE_WORD}, align 8")
    quiet = text.let(f"icmp eq i64 {word}, {NO_FAILURE}", "b")
    asked, end, going = (text.new_label(hint) for hint in ("asked", "stopped", "going"))
    text.line(f"br i1 {quiet}, label %{going}, label %{asked}")
    text.begin_block(asked)
    text.line(f"call void @{POLL_FUNCTION}(ptr @{FAILURE_WORD})")
    after = text.let(f"load volatile i64, ptr @{FAILURE_WORD}, align 8")
    stopped = text.let(f"icmp ult i64 {after}, {FIRST_KEY}", "b")
    text.line(f"br i1 {stopped}, label %{end}, label %{going}")
    text.begin_block(end)
    text.line("ret void")
    text.begin_block(going)


# Grid barrier: a call of the runtime.


BARRIER_FUNCTION, BARRIER_CONTEXT = "tessera_meet", "tessera_meeting"
# Each program of a cooperative launch has a thread of the operating system.
MAX_BARRIER_PROGRAMS = 256


@statement_rule(tile.grid_barrier)
def _(kernel, node):
    text = kernel.text
    context = text.let(f"load i64, ptr @{BARRIER_CONTEXT}, align 8")
    text.line(f"call void @{BARRIER_FUNCTION}(i64 {context})")
    emit_stop_check(kernel)


# Ids, allocations, and ops that need no code on a processor.


GRID_RANK = 3


@statement_rule(tile.program_id)
def _(kernel, node):
    kernel.scalars[node.out] = f"%pid{_check_grid_axis(node)}" if node.attrs["axis"] < GRID_RANK else "0"


@statement_rule(tile.grid_size)
def _(kernel, node):
    kernel.scalars[node.out] = f"%grid{_check_grid_axis(node)}" if node.attrs["axis"] < GRID_RANK else "1"


def _check_grid_axis(node):
    if node.attrs["axis"] < 0:
        raise UnsupportedOpError("a grid axis is negative", location=node.loc)
    return node.attrs["axis"]


@statement_rule(tile.local_id)
def _(kernel, node):
    kernel.scalars[node.out] = "0"


@statement_rule(tile.group_size)
def _(kernel, node):
    kernel.scalars[node.out] = str(kernel.function.attrs.get("group", 1))


@statement_rule(tile.alloc)
def _(kernel, node):
    type = node.out.type
    shape = tuple(int(n) for n in type.shape)
    rows = (*shape[:-1], shape[-1] + node.attrs["padding"]) if shape else ()
    kernel.memrefs[node.out] = kernel.scratch.allocate(type.dtype, shape, make_row_major_strides(rows))
    kernel.scratch.record_access(kernel.memrefs[node.out])  # live from here: a loop may write it before it reads


@statement_rule(tile.barrier, tile.async_commit, tile.async_wait)
def _(kernel, node):
    """No code: a program is one thread, and copies are synchronous."""


# Assertions and prints: operands are stored in scratch memory and passed to the runtime.


REPORT_FUNCTION, REPORT_CONTEXT = "tessera_report", "tessera_context"


@statement_rule(report_op)
def _(kernel, node):
    text = kernel.text
    table = kernel.scratch.allocate(int64, (len(node.args),), (1,))
    kernel.scratch.record_access(table)
    memrefs = [_materialise_operand(kernel, v) for v in node.args]
    for number, memory in enumerate(memrefs):
        kernel.scratch.record_access(memory)
        slot = text.let(f"getelementptr i64, ptr {table.base}, i64 {number}", "p")
        text.line(f"store ptr {memory.base}, ptr {slot}, align 8")
    context = text.let(f"load i64, ptr @{REPORT_CONTEXT}, align 8")
    site = kernel.library.add_site(_describe_site(kernel, node))
    kernel.scratch.record_access(table)
    text.line(
        f"call void @{REPORT_FUNCTION}(i64 {context}, i64 {site}, i64 {_emit_program_number(kernel)}, ptr {table.base})"
    )
    if node.attrs["kind"] != "print":  # the program ends here
        text.line("ret void")
        text.begin_block(text.new_label("unreached"))


def _materialise_operand(kernel: LlvmKernelContext, v: Value) -> StridedMemRef:
    """A value in memory, row-major."""
    shape = static_shape(v.type)
    memory: StridedMemRef = kernel.scratch.allocate(v.type.dtype, shape, make_row_major_strides(shape))
    if is_block(v):
        materialise_block(kernel, v, memory)
    else:
        store_lane(LoopBody(kernel), memory, (), LaneValue(kernel.scalars[v]))
    return memory


def _emit_program_number(kernel: LlvmKernelContext) -> str:
    """The linear program id, in row-major order."""
    text = kernel.text
    rows = text.let("mul i64 %pid0, %grid1", "i")
    row = text.let(f"add i64 {rows}, %pid1", "i")
    first = text.let(f"mul i64 {row}, %grid2", "i")
    return text.let(f"add i64 {first}, %pid2", "i")


def _describe_site(kernel: LlvmKernelContext, node: Node) -> dict[str, Any]:
    """A report as JSON data for the manifest."""
    attrs = kernel.function.attrs
    return {
        **node.attrs,
        "grid": [int(n) for n in attrs.get("grid", ())],
        "group": int(attrs.get("tiles", 1)),
        "place": describe_location(node.loc),
        "operands": [{"shape": list(static_shape(v.type)), "dtype": v.type.dtype.name} for v in node.args],
    }


@statement_rule(tile.line)
def _(kernel, node):
    """No code: a stop for the debugger alone."""


@statement_rule(tile.pause)
def _(kernel, node):
    raise UnsupportedOpError(
        "the target llvm has no breakpoints", location=node.loc,
        suggestion='run this kernel with target="interp", or remove breakpoint()',
    )  # fmt: skip
