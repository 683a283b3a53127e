"""Translation validation: each pass on the way to a target is interpreted before and after, on the suite's cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.case import Case, Outcome
from conformance.run import Engine
from tessera.codegen.contract import PassPipeline, get_backend
from tessera.core.errors import Location, ResourceError, UnsupportedOpError
from tessera.core.symbolic_dim import UnknownSizeError
from tessera.ir.core import Module
from tessera.ir.rewrite import UseDef
from tessera.lower.lowering_plan import check_values
from tessera.ops.tensor import reduce, shape
from tessera.runtime.program import PreparedProgram
from tessera.tools.bisect import FAILED, StepVerdict, judge_passes, reduce_program

# Passes after which the interpreter may round in another order, or at other places; every other pass keeps all bits.
ROUNDING_PASSES = frozenset({
    "expand", "window sums", "vector products", "reduction splitting", "launch fusion", "schedule", "tile",
    "narrow products", "mesh", "mesh partition", "exp2 selection", "product splitting", "accumulator fusion",
    "FMA contraction", "mainloop formation", "asynchronous MMA formation", "FMA contraction of asynchronous loops",
    "partial sums",
})  # fmt: skip
ARCHITECTURES = {"ptx": ("sm_80", "sm_90a")}
REFUSALS = (UnsupportedOpError, ResourceError, UnknownSizeError)  # a pass of a mesh needs every size as a number


@dataclass(frozen=True)
class PassEngine(Engine):
    """One column: the passes of the lowering to a target, and those of its generator."""

    options: Mapping[str, Any] = field(default_factory=dict)

    def validate(self, case: Case, program: PreparedProgram, bounds: Sequence[Any]) -> Outcome:
        """The outcome of a case: the first pass that changes a value, with the ops that it changes."""
        share, useless, before = 0.0, False, None
        for verdict in judge_passes(program, self.target, self.options, bounds):
            wrong = _describe_fault(verdict, before, case)
            if isinstance(verdict.error, REFUSALS):
                return Outcome(case.name, self.name, "unsupported", detail=str(verdict.error))
            if wrong is not None:
                detail = f"{verdict.step} is the first pass that changes a value: {wrong}"
                return Outcome(case.name, self.name, "fail", detail=f"{detail}\n{describe_ops(program, verdict)}")
            if verdict.agreement is not None:
                share = max(share, verdict.agreement.worst_share)
                useless |= verdict.agreement.useless and not (case.exact or case.alike)
            before = verdict if verdict.results else before
        return Outcome(case.name, self.name, "pass", share, useless=useless)


def list_pass_engines(targets: Sequence[str] = ()) -> list[PassEngine]:
    """A column for each target and architecture whose generator names its passes."""
    found = []
    for target in targets or ("llvm", "ptx", "csl:2x2"):
        if not isinstance(get_backend(target), PassPipeline):
            continue
        for arch in ARCHITECTURES.get(target, ("",)):
            options = {"arch": arch} if arch else {}
            found.append(PassEngine(f"{target} {arch} passes".replace("  ", " "), "passes", target, options))
    return found


def _describe_fault(verdict: StepVerdict, before: StepVerdict | None, case: Case) -> str | None:
    """What is wrong with the results of a pass; None if nothing is."""
    if verdict.error is not None:
        return f"{type(verdict.error).__name__}: {verdict.error}" if verdict.status == FAILED else None
    if verdict.bad:
        place = f"output {verdict.output} {verdict.agreement}"
        return f"{place}; it is {verdict.found:.9g}, and it should be {verdict.reference:.9g} ± {verdict.radius:.2g}"
    unlike = verdict.agreement is not None and verdict.agreement.unlike is not None and not case.unknown
    if unlike:
        return f"output {verdict.output} {verdict.agreement}"
    if before is not None and verdict.results and verdict.step not in ROUNDING_PASSES and not _replaces_sums(verdict):
        return _compare_bits(before.results, verdict.results)
    return None


def _replaces_sums(verdict: StepVerdict) -> bool:
    """Whether a simplification made additions of a sum of stacked slices, which NumPy adds in another order."""
    if not (isinstance(verdict.before, Module) and isinstance(verdict.after, Module)):
        return False
    return _count_sums_of_slices(verdict.after) < _count_sums_of_slices(verdict.before)


def _count_sums_of_slices(module: Module) -> int:
    """The sums of what ops concatenate, directly or after they moved it."""
    found = 0
    for function in module.functions:
        uses = UseDef(function)
        for node in function.body.walk():
            source = uses.get(node.args[0]) if node.op is reduce.sum else None
            while source is not None and source.op in (shape.reshape, shape.permute):
                source = uses.get(source.args[0])
            found += source is not None and source.op is shape.concatenate
    return found


def _compare_bits(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> str | None:
    """The first element whose bits a pass changed, though it rounds nothing; NaNs are alike."""
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        old, new = np.asarray(old), np.asarray(new)
        same = (old == new) & (_signs(old) == _signs(new)) | ((old != old) & (new != new))
        if not np.all(same):
            at = tuple(int(i) for i in np.argwhere(~same)[0])
            return f"output {number} at {list(at)} was {old[at]}, and is {new[at]}; the pass must keep every bit"
    return None


def _signs(array: np.ndarray) -> Any:
    return np.signbit(array.astype(np.float64)) if array.dtype.kind not in "iub" else False


@check_values(False)  # the search runs wrong passes
def describe_ops(program: PreparedProgram, verdict: StepVerdict) -> str:
    """The ops that show a fault: the fewest of a Graph program, else those that the pass made."""
    part = reduce_program(program, verdict) if verdict.bad else None
    if part is not None:
        nodes = part.function.body.nodes
        return f"shown by {len(nodes)} of {part.of} ops: " + ", ".join(_name_op(n.op.name, n.loc) for n in nodes)
    if not isinstance(verdict.before, Module) or not isinstance(verdict.after, Module):
        return "the pass gives no module"
    old, new = _count_ops(verdict.before), _count_ops(verdict.after)
    grown = Counter(name for name, _ in new.elements())
    grown.subtract(Counter(name for name, _ in old.elements()))
    made, gone = sorted(new - old, key=lambda k: -grown[k[0]]), sorted(old - new, key=lambda k: grown[k[0]])
    listed = [f"+{_name_op(*k)}" for k in made[:SHOWN_OPS]] + [f"-{_name_op(*k)}" for k in gone[:SHOWN_OPS]]
    return f"the ops that it changes: {', '.join(listed) or 'none but their operands or attributes'}"


SHOWN_OPS = 5  # on either side: first those of which the pass makes or removes the most


def _count_ops(module: Module) -> Counter[tuple[str, Location]]:
    """The ops of a module with their source lines."""
    return Counter((n.op.name, n.loc) for f in module.functions for n in f.body.walk())


def _name_op(name: str, loc: Location) -> str:
    return f"{name} ({loc.file.rpartition('/')[2]}:{loc.line})" if loc.line else name
