"""Kernel emitter: the state of emitting one tile function, the walk over its nodes, and the functions that it calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tessera.codegen.block_types import static_shape
from tessera.codegen.coverage import make_refusal_error
from tessera.codegen.llvm.passes.bufferisation import BufferisationPlan, is_block, is_fusible
from tessera.codegen.llvm.table import conversions
from tessera.codegen.llvm.table.emission import statement_rule
from tessera.codegen.llvm.table.loop_fusion import choose_vector_width, emit_element, materialise_block
from tessera.codegen.llvm.table.matmul import accumulate_product
from tessera.codegen.llvm.table.refusals import REFUSED
from tessera.codegen.llvm.text.builder import LlvmBuilder, LoopBody
from tessera.codegen.llvm.text.memory import ScratchAllocator, StridedMemRef
from tessera.codegen.value_ranges import IntervalAnalysis
from tessera.core.errors import Location, TesseraError
from tessera.core.types import TensorType
from tessera.ir.core import Block, Function, Node, Value
from tessera.ops.tensor.stochastic_rounding import round_by_chance

# The functions a module needs besides its kernels: math, micro-kernels, and declarations of intrinsics.


_DEFINE_PATTERN = re.compile(r"define .*?@(?P<name>[\w.]+)\(")
_CALL_PATTERN = re.compile(r"call (?P<result>[^@]*?) @(?P<name>[\w.]+)\((?P<args>.*)\)")


class FunctionLibrary:
    """Functions by name, each made when first asked for."""

    def __init__(self) -> None:
        self._functions: dict[str, list[str]] = {}
        self.sites: list[dict[str, Any]] = []  # the places of the text that report to the runtime

    def need(self, name: str, make: Callable[[], Iterable[str]]) -> str:
        """The name of a function, made here unless it was before."""
        if name not in self._functions:
            self._functions[name] = []
            self._functions[name] = list(make())
        return name

    def site(self, described: dict[str, Any]) -> int:
        """The number of a place that reports."""
        self.sites.append(described)
        return len(self.sites) - 1

    def text(self) -> Iterator[str]:
        """Every function, in the order of their names."""
        for name in sorted(self._functions):
            yield from self._functions[name]
            yield ""


def declare_externals(lines: Iterable[str]) -> Iterator[str]:
    """A declaration for each intrinsic or C function that is called and not defined here."""
    listed = list(lines)
    defined = {found["name"] for line in listed if (found := _DEFINE_PATTERN.match(line))}
    needed: dict[str, str] = {}
    for line in listed:
        call = _CALL_PATTERN.search(line) if " call " in line else None
        if call is not None and call["name"] not in defined:
            needed.setdefault(
                call["name"], f"declare {call['result']} @{call['name']}({_parse_argument_types(call['args'])})"
            )
    return (needed[name] for name in sorted(needed))


def _parse_argument_types(args: str) -> str:
    return ", ".join(_parse_type(each) for each in _split_arguments(args))


def _split_arguments(args: str) -> list[str]:
    """Operands apart; commas within < > and ( ) do not part them."""
    found, depth, start = [], 0, 0
    for place, char in enumerate(args):
        depth += (char in "<([") - (char in ">)]")
        if char == "," and depth == 0:
            found.append(args[start:place].strip())
            start = place + 1
    return [*found, args[start:].strip()] if args.strip() else []


def _parse_type(operand: str) -> str:
    return operand[: operand.index(">") + 1] if operand.startswith("<") else operand.split()[0]


# The state of emitting one tile function, and the walk over its nodes.


class LlvmKernelEmitter:
    """One tile function under emission.

    A value is in `scalars` (the name of a register), in `memories` (refs), in `buffers` (blocks held in
    scratch memory), or is computed from its producer wherever a loop asks for an element.
    """

    def __init__(
        self,
        function: Function,
        text: LlvmBuilder,
        library: FunctionLibrary,
        vector_bytes: int,
        grid: Sequence[int] | None = None,
        apart: bool = True,
    ) -> None:
        self.function, self.text, self.library, self.vector_bytes = function, text, library, vector_bytes
        self.scratch = ScratchAllocator(text)
        self.plan = BufferisationPlan(function, apart)
        self.producers: dict[Value, Node] = {}
        self.ranges = IntervalAnalysis(self.producers, grid)
        self.scalars: dict[Value, str] = {}
        self.memories: dict[Value, StridedMemRef] = {}
        self.buffers: dict[Value, StridedMemRef] = {}
        self._loc: Location = function.loc

    @contextmanager
    def at(self, node: Node) -> Iterator[None]:
        """Tie the lines emitted inside, and errors, to the node's place."""
        before, self._loc = self._loc, node.loc
        self.text.place(node.loc)
        try:
            yield
        except TesseraError as error:
            raise error.at(node.loc) from None
        finally:
            self._loc = before
            self.text.place(before)

    def run(self, block: Block) -> None:
        """Emit the nodes of a block in order."""
        for node in block.nodes:
            for v in node.results:
                self.producers[v] = node
            with self.at(node):
                self._node(node)

    def _node(self, node: Node) -> None:
        _check_policy(node)
        rule = statement_rule.get(node.op)
        if node.results and node.results[0] in self.plan.joined:
            accumulate_product(self, node, self.plan.joined[node.out])
        elif rule is not None:
            rule(self, node)
        elif not is_fusible(node.op):
            raise make_refusal_error("llvm", node, REFUSED)
        elif not is_block(node.out):
            self.scalars[node.out] = emit_element(LoopBody(self), node.out, ()).name
        elif node.out in self.plan.held:
            self.hold(node.out)

    def hold(self, v: Value) -> None:
        """Compute a block into memory now."""
        target = self.room(v)
        materialise_block(self, v, target)
        self.buffers[v] = target

    def room(self, v: Value) -> StridedMemRef:
        """Memory for a block: that of the loop parameter it becomes, where the plan says so, or new."""
        param = self.plan.target.get(v)
        if param is not None:
            return self.buffers[param]
        return self.spare(v)

    def spare(self, v: Value) -> StridedMemRef:
        """New memory for a block."""
        return self.scratch.block(v.type.dtype, static_shape(v.type), choose_vector_width(self, v.type.dtype))

    def move(self, v: Value, target: StridedMemRef) -> None:
        """Bring a block to a memory, unless it is there."""
        if self.buffers.get(v) is not target:
            materialise_block(self, v, target)


def _check_policy(node: Node) -> None:
    if node.op is round_by_chance:
        return  # its own row rounds from f64, once
    operands = tuple(t.dtype for t in node.types)
    for v in node.results:
        if isinstance(v.type, TensorType) and (found := conversions.find_unsupported_policy(v.type, operands)):
            raise conversions.make_policy_error(found, node.loc)
