"""WebAssembly: the machine code of a program for wasm32, with its launch plan, as one object file (WebAssembly 2.0).

The memory of a module is laid out ahead: after the linker's `__heap_base` come the parameters, the workspace and the
scratch memory, each at a fixed offset, so that a call allocates nothing. `tessera_run` executes the plan on one thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.artifact import Artifact
from tessera.codegen.c_plan import ALIGN, FIRST_SITE, CParameter, CProgram, describe_site, read_program
from tessera.codegen.host_plan import find_steps
from tessera.codegen.llvm.runtime.jit import compile_for_machine
from tessera.codegen.llvm.runtime.program import TEXT_FILE
from tessera.codegen.llvm.text import protocol
from tessera.codegen.llvm.web_arithmetic import define_web_functions
from tessera.codegen.web_module import BASE, DESCRIPTION_FILE, MACHINE, MAX_BYTES, OBJECT_FILE, RUN
from tessera.core.errors import ResourceError, UnsupportedOpError, user_location
from tessera.core.types import as_dtype

TRIPLE = "wasm32-unknown-unknown"
# What all browsers have had since 2023.
FEATURES = "+simd128,+bulk-memory,+sign-ext,+mutable-globals,+nontrapping-fptoint"
VECTOR_BYTES = 16


@dataclass(frozen=True)
class MemoryLayout:
    """Where parts of a program's memory are, in bytes after the base: the parameters that a caller passes, by number,
    the workspace and the scratch memory; `total` is the size of all."""

    parameters: Mapping[int, int]
    workspace: int
    scratch: int
    total: int


def plan_layout(program: CProgram) -> MemoryLayout:
    """The layout of a program's memory.

    Raises:
        ResourceError: it is larger than the memory of a module.
    """
    sizes = {p.number: count_bytes(p) for p in program.passed}
    workspace, scratch = int(program.plan["workspace"]), max([0, *map(int, program.plan["scratch"].values())])
    places, end = {}, 0
    for number, size in sizes.items():
        places[number], end = end, _round_up(end + size)
    layout = MemoryLayout(places, end, _round_up(end + workspace), _round_up(end + workspace) + _round_up(scratch))
    needed = layout.total + len(program.weights)
    if needed > MAX_BYTES:
        raise ResourceError(
            f"{program.name} needs {needed:,} bytes of memory", location=user_location(),
            expected=f"at most {MAX_BYTES:,} on wasm32", received=f"{needed:,}", suggestion="use smaller sizes",
        )  # fmt: skip
    return layout


def count_bytes(parameter: CParameter) -> int:
    """The bytes of a parameter in memory."""
    data = parameter.data
    return math.prod(map(int, data["shape"])) * int(as_dtype(data["dtype"]).numpy.itemsize)


def _round_up(count: int) -> int:
    return -(-count // ALIGN) * ALIGN


def emit_web_object(artifact: Artifact, name: str, stored: Mapping[str, bytes]) -> dict[str, Any]:
    """The object file of a program and its description, which says where its parameters are.

    Raises:
        UnsupportedOpError: it has symbolic sizes, or needs Python.
    """
    program = read_program(artifact, name, stored)
    if program.sizes:
        raise UnsupportedOpError(
            f"the machine {MACHINE} needs the value of each size", location=user_location(),
            received=", ".join(program.sizes), suggestion="leave out `dynamic`: build a module for each size",
        )  # fmt: skip
    layout = plan_layout(program)
    text = "\n".join([define_web_functions(artifact.text(TEXT_FILE)), *_HostText(program, layout).lines(), ""])
    code = compile_for_machine(text, TRIPLE, "generic", FEATURES, (RUN, BASE))
    return {OBJECT_FILE: code, DESCRIPTION_FILE: json.dumps(describe_program(program, layout), indent=1) + "\n"}


def describe_program(program: CProgram, layout: MemoryLayout) -> dict[str, Any]:
    """What a caller needs: the parameters with their places, the memory, and the texts of failures."""
    parameters = [
        {
            "name": p.name, "shape": [int(n) for n in p.data["shape"]], "dtype": p.data["dtype"],
            "offset": layout.parameters[p.number], "bytes": count_bytes(p),
            "role": p.data["role"], "written": p.written,
        }
        for p in program.passed
    ]  # fmt: skip
    return {
        "name": program.name, "machine": MACHINE, "parameters": parameters, "bytes": layout.total,
        "errors": {str(FIRST_SITE + i): describe_site(site) for i, site in enumerate(program.sites)},
    }  # fmt: skip


# The text of the host's part.

_RUNTIME = f"""\
@__heap_base = external global i8
@tessera_failed = internal global i64 {2**63 - 1}
@tessera_slots = internal global [SLOTS x i64] zeroinitializer, align 8

define internal void @{protocol.POLL_FUNCTION}(ptr %word) {{
  ret void
}}

define internal void @{protocol.REPORT_FUNCTION}(i64 %context, i64 %site, i64 %program, ptr %table) {{
  %next = add i64 %program, 1
  %high = shl i64 %next, {protocol.FAILURE_PROGRAM_BIT}
  %key = or i64 %high, %site
  %seen = load i64, ptr @tessera_failed
  %least = call i64 @llvm.smin.i64(i64 %key, i64 %seen)
  store i64 %least, ptr @tessera_failed
  ret void
}}

declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)

define i64 @{BASE}() {{
  %end = ptrtoint ptr @__heap_base to i64
  %more = add i64 %end, {ALIGN - 1}
  %base = and i64 %more, -{ALIGN}
  ret i64 %base
}}
"""


class _HostText:
    """The launch plan of a program as LLVM IR; values and labels are numbered in order."""

    def __init__(self, program: CProgram, layout: MemoryLayout) -> None:
        self.program, self.layout = program, layout
        self.body: list[str] = []
        self.loops: dict[int, str] = {}
        self.count = 0

    def lines(self) -> Iterator[str]:
        """The runtime's functions, the weights, and the function that executes the plan."""
        plan = self.program.plan
        slots = max([1, *(len(e["args"]) + len(e["grid"]) for e in plan["launches"])])
        yield _RUNTIME.replace("SLOTS", str(slots))
        if self.program.weights:
            data = self.program.weights.hex("\\")
            yield f'@tessera_weights = internal constant [{len(self.program.weights)} x i8] c"\\{data}", align {ALIGN}'
        yield f"define i32 @{RUN}() {{"
        yield "entry:"
        yield f"  %base = call i64 @{BASE}()"
        yield f"  store i64 {2**63 - 1}, ptr @tessera_failed"
        yield f"  store i64 {protocol.NO_FAILURE}, ptr @{protocol.FAILURE_WORD}"
        self._clear_read_outputs()
        self._emit_steps(find_steps(plan))
        yield from (f"  {line}" if not line.endswith(":") else line for line in self.body)
        yield "  ret i32 0"
        yield "}"

    def new(self, text: str) -> str:
        """A numbered value of an instruction."""
        name = f"%t{self.count}"
        self.count += 1
        self.body.append(f"{name} = {text}")
        return name

    def label(self) -> str:
        """A numbered label."""
        self.count += 1
        return f"b{self.count}"

    def _clear_read_outputs(self) -> None:
        """Outputs that kernels read before they write them, as atomics do, begin as zeros."""
        for p in self.program.passed:
            if p.data["role"] == "output" and p.number in self.program.plan["read"]:
                at = self.new(f"inttoptr i64 {self._add('%base', self.layout.parameters[p.number])} to ptr")
                self.body.append(f"call void @llvm.memset.p0.i64(ptr {at}, i8 0, i64 {count_bytes(p)}, i1 false)")

    def _add(self, value: str, number: int) -> str:
        return self.new(f"add i64 {value}, {number}") if number else value

    def address(self, argument: Mapping[str, Any]) -> str:
        """The address of an argument of a launch, as an i64."""
        if "param" in argument:
            parameter = self.program.parameters[argument["param"]]
            if parameter.stored:
                value = self._add(self.new("ptrtoint ptr @tessera_weights to i64"), parameter.offset)
            else:
                value = self._add("%base", self.layout.parameters[parameter.number])
        else:
            value = self._add("%base", self.layout.workspace + int(argument["offset"]))
        for loop, count in argument.get("moves", ()):
            step = self.new(f"mul i64 {self.loops[loop]}, {int(count)}")
            value = self.new(f"add i64 {value}, {step}")
        return value

    def _emit_steps(self, steps: Sequence[Mapping[str, Any]]) -> None:
        for step in steps:
            if "run" in step:
                for number in range(*step["run"]):
                    self._emit_launch(self.program.plan["launches"][number])
            elif "loop" in step:
                self._emit_loop(step)
            elif "while" in step:
                self._emit_while(step)
            else:
                self._emit_if(step)

    def _emit_launch(self, entry: Mapping[str, Any]) -> None:
        values = [self._slot(a) for a in entry["args"]] + [str(int(n)) for n in entry["grid"]]
        for i, value in enumerate(values):
            at = self.new(f"getelementptr i64, ptr @tessera_slots, i64 {i}")
            self.body.append(f"store i64 {value}, ptr {at}")
        scratch = self.new(f"inttoptr i64 {self._add('%base', self.layout.scratch)} to ptr")
        total = math.prod(int(n) for n in entry["grid"])
        self.body.append(f"call void @{entry['kernel']}.task(ptr @tessera_slots, i64 0, i64 {total}, ptr {scratch})")
        failed = self.new("load i64, ptr @tessera_failed")
        fine = self.new(f"icmp eq i64 {failed}, {2**63 - 1}")
        bad, on = self.label(), self.label()
        self.body += [f"br i1 {fine}, label %{on}, label %{bad}", f"{bad}:"]
        site = self.new(f"and i64 {failed}, {(1 << protocol.FAILURE_PROGRAM_BIT) - 1}")
        code = self.new(f"add i64 {site}, {FIRST_SITE}")
        self.body += [f"ret i32 {self.new(f'trunc i64 {code} to i32')}", f"{on}:"]

    def _slot(self, argument: Mapping[str, Any]) -> str:
        if "value" in argument:
            return str(int(argument["value"]))
        parameter = self.program.parameters[argument["param"]] if "param" in argument else None
        address = self.address(argument)
        if parameter is None or not parameter.scalar:
            return address
        bits = 8 * count_bytes(parameter)
        word = self.new(f"load i{bits}, ptr {self.new(f'inttoptr i64 {address} to ptr')}")
        return self.new(f"zext i{bits} {word} to i64") if bits < 64 else word

    def _emit_loop(self, step: Mapping[str, Any]) -> None:
        head, body, done = self.label(), self.label(), self.label()
        before = self.label()
        self.body += [f"br label %{before}", f"{before}:", f"br label %{head}", f"{head}:"]
        following = f"%n{head}"
        number = self.new(f"phi i64 [ 0, %{before} ], [ {following}, %{body}.end ]")
        more = self.new(f"icmp slt i64 {number}, {int(step['count'])}")
        self.body += [f"br i1 {more}, label %{body}, label %{done}", f"{body}:"]
        scaled = self.new(f"mul i64 {number}, {int(step['step'])}")
        self.loops[step["loop"]] = self.new(f"add i64 {scaled}, {int(step['first'])}")
        self._emit_steps(step["body"])
        self.body += [f"br label %{body}.end", f"{body}.end:", f"{following} = add i64 {number}, 1"]
        self.body += [f"br label %{head}", f"{done}:"]

    def _emit_while(self, step: Mapping[str, Any]) -> None:
        head, body, done = self.label(), self.label(), self.label()
        self.body += [f"br label %{head}", f"{head}:"]
        self._emit_steps(step["test"])
        self.body += [f"br i1 {self._flag(step['while'])}, label %{body}, label %{done}", f"{body}:"]
        self._emit_steps(step["body"])
        self.body += [f"br label %{head}", f"{done}:"]

    def _emit_if(self, step: Mapping[str, Any]) -> None:
        then, other, done = self.label(), self.label(), self.label()
        self.body += [f"br i1 {self._flag(step['if'])}, label %{then}, label %{other}"]
        for label, part in ((then, "then"), (other, "else")):
            self.body.append(f"{label}:")
            self._emit_steps(step[part])
            self.body.append(f"br label %{done}")
        self.body.append(f"{done}:")

    def _flag(self, number: int) -> str:
        at = self.new(f"inttoptr i64 {self.address(self.program.plan['flags'][number])} to ptr")
        return self.new(f"icmp ne i8 {self.new(f'load i8, ptr {at}')}, 0")
