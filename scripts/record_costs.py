"""What programs of the suite cost on each target: launches, memory, and instructions by kind; no time is measured.
And how much their error bounds allow: the bits of the results that they make certain. And what programs of many sizes
are lowered to (`scripts/sized_programs.py`).

    python scripts/record_costs.py           # writes tests/codegen/program_costs.json
    python scripts/record_costs.py --show    # only prints what has changed

A change of a pass, a schedule, a cost model or a memory plan which keeps all results shows here and nowhere else:
`tests/codegen/test_program_costs.py` compares. After a change that is meant, look at the difference and record again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from sized_programs import PROGRAMS, SIZED_TARGETS, list_choices  # noqa: E402

from conformance.case import Case, all_cases  # noqa: E402
from tessera.core.errors import ResourceError, UnsupportedOpError  # noqa: E402
from tessera.runtime.program import prepare  # noqa: E402

RECORD = ROOT / "tests" / "codegen" / "program_costs.json"
# Of one machine, which need not be this one.
TARGETS: dict[str, dict[str, Any]] = {
    "llvm": {"vector_bytes": 32, "pair_products": False, "byte_products": 1},
    "ptx": {"arch": "sm_90a"},
    "csl": {"arch": "wse3"},
}
TEXTS = (".ll", ".ptx", ".csl")
# Of how many cases of an area one is recorded; of pointwise ops few, which are much alike.
SHARES = {
    "graph/linalg": 3, "graph/networks": 12, "graph/flow": 3, "graph/launches": 16, "graph/reduce": 16,
    "graph/shape": 16, "graph/gradients": 12, "graph/composites": 24, "graph/sizes": 8, "graph/found": 24,
    "graph/scatter": 24,
    "tile/products": 8, "tile/stdlib": 8, "tile/groups": 8, "tile/memory": 8, "tile/tutorials": 8, "tile/scans": 8,
    "tile/language": 4, "tile/blocks": 4, "tile/control": 12,
}  # fmt: skip
# Kinds of instructions, by a pattern that a line of text has: memory, synchronisation, branches, products.
KINDS = {
    "memory": re.compile(r"\b(load|store|ld|st|ldmatrix|stmatrix|atom|red|cp)\b|@(mov|fmov)"),
    "waits": re.compile(r"\b(bar|barrier|mbarrier|fence|commit_group|wait_group|wait_all|await|activate|block)\b"),
    "branches": re.compile(r"\b(br|bra|switch|phi|for|while|if)\b"),
    "products": re.compile(r"\b(wgmma|mma|fma|fmac)\b|llvm\.fm(a|uladd)|@fmac"),
}


BOUND_SHARES = {
    "graph/numerics": 3, "graph/elementwise": 6, "graph/reduce": 4, "graph/composites": 4, "graph/linalg": 2,
    "graph/scatter": 6, "graph/gradients": 6, "graph/networks": 4, "graph/flow": 4,
}  # fmt: skip


def is_recorded(case: Case, shares: Mapping[str, int] = SHARES) -> bool:
    """Whether the costs of a case are recorded."""
    share = shares.get("/".join(case.name.split("/")[:2]))
    plain = case.rejects is None and case.mesh is None and case.dynamic is None
    return share is not None and plain and zlib.crc32(case.name.encode()) % share == 0


def count_costs(case: Case, target: str) -> dict[str, int] | None:
    """The costs of a case on a target; None if that refuses it."""
    entry, arguments = case.entry()
    try:
        artifact = prepare(entry, arguments, target, case.grid, case.group).emit(target, TARGETS[target])
    except (UnsupportedOpError, ResourceError):
        return None
    texts = [content for name, content in artifact.files.items() if name.endswith(TEXTS)]
    lines = [line for text in texts for line in _decode(text).splitlines() if line.strip()]
    plan = artifact.manifest.get("plan") or {}
    counts = Counter({name: sum(bool(p.search(line)) for line in lines) for name, p in KINDS.items()})
    workspace = plan.get("workspace", 0)
    counts |= {"launches": len(plan.get("launches", ())), "lines": len(lines), "workspace": workspace}
    entries = (plan.get("entries") or {}).values()
    counts |= {name: sum(e.get(name, 0) for e in entries) for name in ("threads", "shared")}
    counts["resident"] = sum(int(n) for line in lines for n in re.findall(r"\.minnctapersm (\d+)", line))
    return {name: counts[name] for name in sorted(counts) if counts[name]}


def measure_bounds(case: Case) -> dict[str, Any] | None:
    """The bits that error bounds make certain (the median of each float result), and elements without a bound."""
    entry, arguments = case.entry()
    with np.errstate(all="ignore"):
        bounds = prepare(entry, arguments, "interp", lower=False).bounds()
        found = [b for b in bounds if b.value.size and b.value.dtype.kind == "f"]
        shares = [np.median(b.radius / np.where(b.value == 0, 1.0, np.abs(b.value))) for b in found]
        bits = [round(float(-np.log2(s)), 1) if 0 < s < np.inf else None for s in shares]
    unbounded = sum(int(np.count_nonzero(~np.isfinite(b.radius))) for b in bounds)
    return {"bits": bits, "exact": sum(int(np.count_nonzero(b.radius == 0)) for b in bounds), "unbounded": unbounded}


def _decode(text: Any) -> str:
    return text.decode() if isinstance(text, bytes) else str(text)


def list_costs(targets: Sequence[str] = (*TARGETS, "bounds")) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """The costs of all recorded cases: (case and target, counts)."""
    for case in all_cases():
        if is_recorded(case):
            yield from ((f"{case.name} {target}", count_costs(case, target)) for target in targets if target in TARGETS)
        if "bounds" in targets and is_recorded(case, BOUND_SHARES):
            yield f"{case.name} bounds", measure_bounds(case)


def list_all_choices() -> Iterator[tuple[str, dict[str, Any] | None]]:
    """What all programs of many sizes are lowered to."""
    for name, kind in itertools.product(PROGRAMS, SIZED_TARGETS):
        yield from list_choices(name, kind)


def main() -> int:
    """Record the costs, and print those that have changed."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--show", action="store_true", help="record nothing")
    given = options.parse_args()
    known = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    found = {**dict(list_costs()), **dict(list_all_choices())}
    for name in [n for n in {**known, **found} if known.get(n, "-") != found.get(n, "-")]:
        print(f"{name}: {known.get(name, '-')} -> {found.get(name, '-')}")
    if not given.show:
        RECORD.write_text("{\n" + ",\n".join(f'"{n}": {json.dumps(found[n])}' for n in sorted(found)) + "\n}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
