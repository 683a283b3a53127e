"""Loops and branches: scalars are carried by phis, blocks stay in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tessera.codegen.llvm.passes.bufferisation import is_block
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import allocate_block, allocate_new, materialise_block, move_block
from tessera.codegen.llvm.table.program_ops import MAX_UNCHECKED_ITERATIONS, emit_stop_check
from tessera.codegen.llvm.text.builder import LineSection, get_register_type, is_number
from tessera.codegen.llvm.text.kernel_emitter import emit_block
from tessera.codegen.llvm.text.memory import StridedMemRef
from tessera.ir.core import Node, Value
from tessera.ops.dialects import control_flow

if TYPE_CHECKING:
    from tessera.codegen.llvm.text.kernel_context import LlvmKernelContext


class LoopCarriedValues:
    """The values that a loop carries: a memory for each block, a phi for each scalar."""

    def __init__(self, kernel: LlvmKernelContext, node: Node, inits: Sequence[Value]) -> None:
        self.kernel, self.node, self.inits = kernel, node, inits
        self.memories = [allocate_block(kernel, v) if is_block(v) else None for v in node.results]
        for v, memory in zip(inits, self.memories, strict=True):
            if memory is not None:
                move_block(kernel, v, memory)
        self.first = [kernel.scalars.get(v, "") for v in inits]
        self.names = ["" if m else kernel.text.new_name("c") for m in self.memories]

    def begin_header(self) -> None:
        """Begin the header block; its phis are filled in when the latch is known."""
        text = self.kernel.text
        self.before, self.label = text.label, text.new_label("head")
        text.branch_to(self.label)
        self.first_clock = text.clock
        self.phis: LineSection = text.new_section()

    def bind(self, values: Sequence[Value]) -> None:
        """Bind values to what is carried."""
        for v, memory, name in zip(values, self.memories, self.names, strict=True):
            if memory is not None:
                self.kernel.buffers[v] = memory
            else:
                self.kernel.scalars[v] = name

    def emit_latch(self, results: Sequence[Value], *more: tuple[str, str, str]) -> None:
        """Pass the next values on and branch to the header; `more` are further i64 phis (name, first, next)."""
        move_blocks(self.kernel, list(zip(results, self.memories, strict=True)))
        text, tail = self.kernel.text, self.kernel.text.label
        text.line(f"br label %{self.label}")
        text.loops.append((self.first_clock, text.clock))
        with text.insert_into(self.phis):
            for name, first, last in more:
                self._emit_phi(name, "i64", first, last, tail)
            for v, name, first in zip(results, self.names, self.first, strict=True):
                if name:
                    self._emit_phi(name, str(get_register_type(v.type.dtype)), first, self.kernel.scalars[v], tail)

    def _emit_phi(self, name: str, kind: str, first: str, last: str, tail: str) -> None:
        self.kernel.text.line(f"{name} = phi {kind} [ {first}, %{self.before} ], [ {last}, %{tail} ]")


def move_blocks(kernel: LlvmKernelContext, moves: list[tuple[Value, StridedMemRef | None]]) -> None:
    """Move blocks to their memories in parallel: a block in a memory that another moves to is copied first."""
    targets = {id(m) for _, m in moves if m is not None}
    pending = [(v, m) for v, m in moves if m is not None and kernel.buffers.get(v) is not m]
    copies = {v: kernel.buffers[v] for v, _ in pending if id(kernel.buffers.get(v)) in targets}
    for v in copies:
        spare = allocate_new(kernel, v)
        materialise_block(kernel, v, spare)
        kernel.buffers[v] = spare
    for v, m in pending:
        materialise_block(kernel, v, m)
    kernel.buffers.update(copies)


@statement_rule(control_flow.for_)
def _(kernel, node):
    text = kernel.text
    lower, upper, step = (kernel.scalars[v] for v in node.args[:3])
    kernel.ranges.loop(node)
    carried = LoopCarriedValues(kernel, node, node.args[3:])
    carried.begin_header()
    index, more = text.new_name("i"), text.new_name("i")
    body_label, exit_label = text.new_label("body"), text.new_label("done")
    text.line(f"br i1 {_emit_loop_condition(kernel, index, upper, step)}, label %{body_label}, label %{exit_label}")
    text.begin_block(body_label)
    body = node.regions[0]
    kernel.scalars[body.params[0]] = index
    carried.bind(body.params[1:])
    if not _is_short(kernel, node):
        emit_stop_check(kernel)
    emit_block(kernel, body)
    text.line(f"{more} = add i64 {index}, {step}")
    carried.emit_latch(body.results, (index, lower, more))
    text.begin_block(exit_label)
    carried.bind(node.results)


def _is_short(kernel: LlvmKernelContext, node: Node) -> bool:
    """Whether a loop has few iterations and no loop inside, so that it needs no stop check of its own."""
    bounds = [kernel.scalars[v] for v in node.args[:3]]
    if not all(is_number(b) for b in bounds) or any(
        n.op in (control_flow.for_, control_flow.while_) for n in node.regions[0].walk()
    ):
        return False
    return len(range(*(int(b) for b in bounds))) <= MAX_UNCHECKED_ITERATIONS


def _emit_loop_condition(kernel: LlvmKernelContext, index: str, upper: str, step: str) -> str:
    """The loop condition: index below its end, or above it for a negative step."""
    text = kernel.text
    if is_number(step):
        return text.let(f"icmp {'slt' if int(step) > 0 else 'sgt'} i64 {index}, {upper}", "b")
    up = text.let(f"icmp sgt i64 {step}, 0", "b")
    below, above = (text.let(f"icmp {word} i64 {index}, {upper}", "b") for word in ("slt", "sgt"))
    return text.let(f"select i1 {up}, i1 {below}, i1 {above}", "b")


@statement_rule(control_flow.while_)
def _(kernel, node):
    text = kernel.text
    condition, body = node.regions
    carried = LoopCarriedValues(kernel, node, node.args)
    carried.begin_header()
    carried.bind(condition.params)
    emit_block(kernel, condition)
    body_label, exit_label = text.new_label("body"), text.new_label("done")
    text.line(f"br i1 {kernel.scalars[condition.results[0]]}, label %{body_label}, label %{exit_label}")
    text.begin_block(body_label)
    carried.bind(body.params)
    emit_stop_check(kernel)
    emit_block(kernel, body)
    carried.emit_latch(body.results)
    text.begin_block(exit_label)
    carried.bind(node.results)


@statement_rule(control_flow.if_)
def _(kernel, node):
    text = kernel.text
    yes, no, done = (text.new_label(hint) for hint in ("then", "else", "done"))
    memories = [allocate_block(kernel, v) if is_block(v) else None for v in node.results]
    text.line(f"br i1 {kernel.scalars[node.args[0]]}, label %{yes}, label %{no}")
    ends = []
    for label, region in zip((yes, no), node.regions, strict=True):
        text.begin_block(label)
        emit_block(kernel, region)
        move_blocks(kernel, list(zip(region.results, memories, strict=True)))
        ends.append((text.label, [kernel.scalars.get(v, "") for v in region.results]))
        text.line(f"br label %{done}")
    text.begin_block(done)
    for number, (v, memory) in enumerate(zip(node.results, memories, strict=True)):
        if memory is not None:
            kernel.buffers[v] = memory
            continue
        sources = ", ".join(f"[ {names[number]}, %{label} ]" for label, names in ends)
        kernel.scalars[v] = text.let(f"phi {get_register_type(v.type.dtype)} {sources}", "c")
