"""GPU timeline: occupancy of each kernel, and instructions, barriers and shared memory of its first thread block.

The timeline is a model, not a measurement: an instruction of a warp takes one slot, and a barrier lasts until its last
warp arrives. Registers are estimated by liveness over the virtual registers of the text; ptxas assigns the real ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.contract import get_backend, load_interpreter
from tessera.core.errors import TesseraError
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.simt import PtxMachine
from tessera.interp.target.ptx.module import LAUNCH_OBSERVER
from tessera.interp.target.ptx.text.parser import parse_module
from tessera.interp.target.ptx.text.syntax import (
    AddressOperand,
    NameOperand,
    PtxFunction,
    PtxInstruction,
    PtxLabel,
    PtxOperand,
    PtxScope,
    PtxVariable,
    VectorOperand,
)
from tessera.runtime.occupancy import GPUS, estimate_occupancy

WARP = 32
MOST_SLOTS = 4000  # of a warp's timeline
MOST_THREADS = 1 << 21  # of all launches of an emulated run
CATEGORIES = ("arithmetic", "matrix", "global memory", "shared memory", "barrier", "wait", "control")
ARITHMETIC, MATRIX, GLOBAL, SHARED, BARRIER, WAIT, CONTROL = range(len(CATEGORIES))
_ARCH_GPUS = {"sm_70": ("V100",), "sm_75": ("T4",), "sm_80": ("A100",), "sm_86": ("A10", "RTX3090"),
              "sm_89": ("L4", "RTX4090"), "sm_90": ("H100", "H200"), "sm_90a": ("H100", "H200"),
              "sm_100": ("B200",), "sm_100a": ("B200",)}  # fmt: skip
REGISTER_STEPS = (16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128, 160, 192, 224, 255)


def classify(op: tuple[str, ...]) -> int:
    """The category of an instruction."""
    head = op[0]
    if head in ("mma", "wgmma", "wmma"):
        return MATRIX
    if head in ("bar", "barrier"):
        return BARRIER
    if head == "mbarrier" or (head == "cp" and any("wait" in w for w in op)):
        return WAIT if any("wait" in w for w in op) else BARRIER
    if "shared" in op or "shared::cta" in op or "shared::cluster" in op or head in ("ldmatrix", "stmatrix"):
        return GLOBAL if "global" in op or head == "cp" else SHARED
    if head in ("ld", "st", "ldu", "red", "atom", "cp", "prefetch") and "param" not in op:
        return GLOBAL
    return CONTROL if head in ("bra", "brx", "ret", "exit", "call", "nanosleep") else ARITHMETIC


@dataclass
class KernelTimeline:
    """What one entry did: for each warp its spans (start, end, category, text line), barriers, shared accesses."""

    warps: int
    spans: list[list[list[int]]]
    clocks: list[int]
    barriers: list[list[int]] = field(default_factory=list)  # slot, number, warps, text line
    shared: list[list[int]] = field(default_factory=list)  # start, end, first byte, last byte, written, text line
    waiting: dict[int, dict[int, int]] = field(default_factory=dict)  # of a barrier: warp to its arrival
    instructions: int = 0
    cut: bool = False

    @classmethod
    def of(cls, warps: int) -> KernelTimeline:
        """An empty timeline."""
        return cls(warps, [[] for _ in range(warps)], [0] * warps)

    def issue(self, warps: Sequence[int], category: int, line: int) -> None:
        """Warps execute one instruction."""
        for warp in warps:
            start = self.clocks[warp]
            if start >= MOST_SLOTS:
                self.cut = True
                continue
            self.instructions += 1
            self.clocks[warp] = start + 1
            self._extend(warp, start, start + 1, category, line)

    def _extend(self, warp: int, start: int, end: int, category: int, line: int) -> None:
        spans = self.spans[warp]
        if spans and spans[-1][1] == start and spans[-1][2] == category and spans[-1][3] == line:
            spans[-1][1] = end
        else:
            spans.append([start, end, category, line])

    def arrive(self, warps: Sequence[int], number: int, expected: int, line: int) -> None:
        """Warps arrive at a barrier; the last one releases all."""
        waiting = self.waiting.setdefault(number, {})
        waiting.update({w: self.clocks[w] for w in warps})
        if len(waiting) < expected:
            return
        release = max(waiting.values())
        for warp, arrived in waiting.items():
            if release > arrived:
                self._extend(warp, arrived, release, WAIT, line)
            self.clocks[warp] = release
        if release < MOST_SLOTS:
            self.barriers.append([release, number, len(waiting), line])
        waiting.clear()

    def touch(self, warps: Sequence[int], low: int, high: int, written: bool, line: int) -> None:
        """Warps access bytes of shared memory."""
        end = max(self.clocks[w] for w in warps)
        start = max(end - 1, 0)
        if end >= MOST_SLOTS:
            return
        last = self.shared[-1] if self.shared else None
        if last and last[1] >= start and last[5] == line and last[4] == written:
            last[1], last[2], last[3] = max(last[1], end), min(last[2], low), max(last[3], high)
        else:
            self.shared.append([start, end, low, high, int(written), line])


class TimelineRecorder:
    """An observer of the PTX emulator that follows the first thread block of each entry's first launch."""

    def __init__(self, entries: Mapping[str, tuple[int, int]]) -> None:
        self.entries = entries  # the first and the last line of each
        self.kernels: dict[str, KernelTimeline] = {}
        self._machines: dict[str, PtxMachine] = {}

    def execute(self, machine: PtxMachine, instruction: PtxInstruction, lanes: LaneSet) -> None:
        """Record an instruction of the first block."""
        found = self._find(machine, instruction)
        warps = _find_warps(machine, lanes) if found is not None else ()
        if found is None or not warps:
            return
        line, category = instruction.location.line, classify(instruction.op)
        found.issue(warps, category, line)
        if category == BARRIER and instruction.op[0] in ("bar", "barrier") and "arrive" not in instruction.op:
            number, expected = _read_barrier(instruction, found.warps)
            if number is not None:
                found.arrive(warps, number, expected, line)

    def access(self, machine: PtxMachine, space: str, lanes: LaneSet, offset: np.ndarray, size: int) -> None:
        """Record an access of the first block to shared memory."""
        instruction = machine.program.lines[machine.pc].instruction
        found = self._find(machine, instruction) if space == "shared" else None
        warps = _find_warps(machine, lanes) if found is not None else ()
        if found is None or not warps or instruction.op[0] == "mbarrier":
            return
        at = lanes.compress(np.asarray(offset))
        mine = at[lanes.ctas == 0] if lanes.flat.size == at.size else at
        mine = mine[mine < machine.shared_size]
        if mine.size:
            written = instruction.op[0] in ("st", "stmatrix", "red", "atom", "cp")
            found.touch(warps, int(mine.min()), int(mine.max()) + size, written, instruction.location.line)

    def transfer(self, machine: PtxMachine, read: int, written: int) -> None:
        """Bulk copies have their instruction in the timeline."""

    def _find(self, machine: PtxMachine, instruction: PtxInstruction) -> KernelTimeline | None:
        line = instruction.location.line
        name = next((n for n, (first, last) in self.entries.items() if first <= line <= last), None)
        if name is None:
            return None
        if name not in self._machines:
            self._machines[name] = machine
            self.kernels[name] = KernelTimeline.of(-(-machine.threads // WARP))
        return self.kernels[name] if self._machines[name] is machine else None


def _find_warps(machine: PtxMachine, lanes: LaneSet) -> Sequence[int]:
    """The warps of the machine's first block among some lanes."""
    if lanes.plain:
        first = lanes.rows.start == 0
        return range(lanes.columns.start // WARP, -(-lanes.columns.stop // WARP)) if first else ()
    flat = lanes.flat[lanes.flat < machine.threads]
    return np.unique(flat // WARP).tolist()  # type: ignore[no-any-return]


def _read_barrier(instruction: PtxInstruction, warps: int) -> tuple[int | None, int]:
    """The number of a barrier and how many warps it expects; None where they are registers."""
    numbers = [getattr(o, "value", None) for o in instruction.operands]
    if not numbers or numbers[0] is None:
        return (0, warps) if not numbers else (None, warps)
    counted = len(numbers) > 1 and numbers[1] is not None
    return int(numbers[0]), -(-int(numbers[1]) // WARP) if counted else warps  # type: ignore[arg-type]


# Registers: the most that are live at once.


_NO_RESULT = frozenset(
    ("st", "bar", "barrier", "bra", "brx", "ret", "exit", "red", "membar", "fence", "cp", "stmatrix", "prefetch",
     "trap", "nanosleep", "setmaxnreg", "discard", "griddepcontrol")
)  # fmt: skip


def estimate_registers(function: PtxFunction) -> int:
    """The 32-bit registers that are live at once, at most: a lower bound of what a thread needs."""
    items = list(_flatten(function.body)) if function.body else []
    widths = _find_widths(items)
    labels = {item.name: i for i, item in enumerate(items) if isinstance(item, PtxLabel)}
    facts = [_uses(item) if isinstance(item, PtxInstruction) else (set(), set(), False) for item in items]
    following = [_list_successors(items, i, labels) for i in range(len(items))]
    live: list[set[str]] = [set() for _ in range(len(items) + 1)]
    changed = True
    while changed:
        changed = False
        for i in range(len(items) - 1, -1, -1):
            read, written, kept = facts[i]
            after = set().union(*(live[j] for j in following[i]))
            now = read | (after if kept else after - written)
            if now != live[i]:
                live[i], changed = now, True
    return max((sum(widths.get(n, 0) for n in each) for each in live), default=0)


def _flatten(scope: PtxScope) -> Iterator[Any]:
    for item in scope.items:
        if isinstance(item, PtxScope):
            yield from _flatten(item)
        else:
            yield item


class _Widths(dict[str, int]):
    """The 32-bit registers of each virtual register; `many` registers are known by their stem."""

    def get(self, name: str, default: Any = 0) -> int:
        return super().get(name, super().get(name.rstrip("0123456789"), default))


def _find_widths(items: Sequence[Any]) -> _Widths:
    found = _Widths()
    for item in items:
        if isinstance(item, PtxVariable) and item.space == "reg":
            bits = re.sub(r"\D", "", item.type.partition("x")[0])
            found[item.name] = 0 if item.type == "pred" else -(-int(bits or 32) // 32)
    return found


def _uses(instruction: PtxInstruction) -> tuple[set[str], set[str], bool]:
    """The registers that an instruction reads and writes, and whether what it writes keeps its old value."""
    operands = list(instruction.operands)
    written: set[str] = set()
    accumulates = instruction.op[0] == "wgmma"
    if operands and instruction.op[0] not in _NO_RESULT and not isinstance(operands[0], AddressOperand):
        written = set(_names(operands[0]))
        operands = operands if accumulates else operands[1:]
    read = {n for o in operands for n in _names(o)}
    if instruction.guard is not None:
        read.add(instruction.guard.text)
    return read, written, instruction.guard is not None or accumulates


def _names(operand: PtxOperand) -> Iterator[str]:
    if isinstance(operand, NameOperand):
        yield operand.text
    elif isinstance(operand, VectorOperand):
        for part in operand.parts:
            yield from _names(part)
    elif isinstance(operand, AddressOperand):
        if operand.base:
            yield operand.base
        for part in operand.coordinates or ():
            yield from _names(part)


def _list_successors(items: Sequence[Any], i: int, labels: Mapping[str, int]) -> list[int]:
    item = items[i]
    if not isinstance(item, PtxInstruction):
        return [i + 1]
    targets = [labels[n] for o in item.operands for n in _names(o) if n in labels] if item.op[0] == "bra" else []
    ends = item.op[0] in ("bra", "ret", "exit") and item.guard is None
    return targets if ends else [*targets, i + 1]


# The description of a program.


def record_gpu(artifact: Artifact, arrays: Sequence[Any], target: str) -> dict[str, Any]:
    """The kernels of an artifact with their occupancy, and with inputs their timelines in the emulator."""
    name = next((n for n in sorted(artifact.files) if n.endswith(".ptx")), "")
    if not name:
        return {"note": "the generator emits no PTX"}
    text, plan = artifact.text(name), artifact.manifest.get("plan", {})
    syntax = parse_module(text, name)
    functions = {f.name: f for f in syntax.functions if f.entry and f.body is not None}
    entries = _find_line_ranges(text)
    recorder, note = TimelineRecorder(entries), _find_obstacle(plan)
    if not note:
        note = _run(artifact, arrays, target, recorder)
    gpus = _ARCH_GPUS.get(str(artifact.manifest.get("options", {}).get("arch", "")), ("A100", "H100"))
    kernels = [
        _describe_kernel(n, f, plan.get("entries", {}).get(n, {}), recorder.kernels.get(n), gpus)
        for n, f in functions.items()
    ]
    grids = {each["kernel"]: each.get("grid", []) for each in reversed(plan.get("launches", []))}
    for each in kernels:
        each["grid"] = [g if isinstance(g, int) else str(g) for g in grids.get(each["name"], [])]
    return {"file": name, "kernels": kernels, "categories": list(CATEGORIES), "note": note, "slots": MOST_SLOTS}


def _find_line_ranges(text: str) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    name, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.search(r"\.entry\s+([\w$]+)", line):
            name, first = match[1], number
        elif line.startswith("}") and name:
            found[name], name = (first, number), ""
    return found


def _find_obstacle(plan: Mapping[str, Any]) -> str:
    """Why a program is not emulated for its timeline; "" where it is."""
    threads = 0
    for each in plan.get("launches", []):
        sizes = [g for g in each.get("grid", []) if isinstance(g, int)]
        if len(sizes) < len(each.get("grid", [])):
            return "no timeline: the grid depends on symbolic sizes"
        threads += int(np.prod(sizes)) * int(plan.get("entries", {}).get(each["kernel"], {}).get("threads", WARP))
    if threads > MOST_THREADS:
        return f"no timeline: the program has {threads:,} threads, and at most {MOST_THREADS:,} are emulated"
    return ""


def _run(artifact: Artifact, arrays: Sequence[Any], target: str, recorder: TimelineRecorder) -> str:
    run = load_interpreter(get_backend(target), artifact)
    token = LAUNCH_OBSERVER.set(recorder)
    try:
        run([np.array(a) if isinstance(a, np.ndarray) else a for a in arrays])
    except TesseraError as error:
        return f"the emulated run ended with {type(error).__name__}: {error.message}"
    finally:
        LAUNCH_OBSERVER.reset(token)
    return ""


def _describe_kernel(
    name: str, function: PtxFunction, entry: Mapping[str, Any], timeline: KernelTimeline | None, gpus: Sequence[str]
) -> dict[str, Any]:
    threads, shared = int(entry.get("threads", WARP)), int(entry.get("shared", 0))
    registers = estimate_registers(function)
    found: dict[str, Any] = {
        "name": name, "threads": threads, "shared": shared, "registers": registers,
        "gpus": [_describe_occupancy(gpu, threads, shared, registers) for gpu in gpus if gpu in GPUS],
    }  # fmt: skip
    if timeline is not None:
        found["timeline"] = {
            "warps": timeline.warps, "spans": timeline.spans, "barriers": timeline.barriers, "shared": timeline.shared,
            "slots": max(timeline.clocks, default=0), "instructions": timeline.instructions, "cut": timeline.cut,
        }  # fmt: skip
    return found


def _describe_occupancy(gpu: str, threads: int, shared: int, registers: int) -> dict[str, Any]:
    curve = [[r, estimate_occupancy(gpu, threads, shared, r).groups] for r in REGISTER_STEPS]
    now = estimate_occupancy(gpu, threads, shared, max(registers, REGISTER_STEPS[0]))
    return {"gpu": gpu, "groups": now.groups, "share": now.share, "limit": now.limit, "curve": curve,
            "threads": GPUS[gpu].threads}  # fmt: skip
