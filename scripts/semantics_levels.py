"""Write the op lists of `docs/semantics/schedule.md`, `tile.md` and `target.md` from the definitions of the ops.

python scripts/semantics_levels.py            # write everything below the mark of each page
python scripts/semantics_levels.py --check    # status 1 if a page is not what the definitions give

The types of an op are those of its first use in a few conformance cases, which have all ops (SOURCES).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import tessera as ts
from conformance.case import Case, all_cases
from tessera.codegen.contract import get_backend, list_target_passes
from tessera.ir.core import Attrs, Function, Module, Node
from tessera.ir.levels import LEVELS, TARGET_OPS, LegalityScope
from tessera.ir.printer import print_type
from tessera.ir.rewrite import has_effect
from tessera.ir.rules import REGISTRY, Op
from tessera.runtime.program import PreparedProgram, prepare

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
from semantics_examples import MARK  # noqa: E402

FOLDER = ROOT / "docs" / "semantics"
# Conformance cases and programs, with the target that they are lowered to, which together have these ops.
SOURCES: tuple[tuple[str, str], ...] = (
    ("product", "ptx"), ("attention", "ptx"), ("large product", "ptx"), ("mixed product", "ptx"),
    ("solution", "interp"), ("long sort", "ptx"),
    ("neighbours", "csl:2x2"), ("steps", "csl:2x2"), ("large product", "csl:2x2"),
    ("rotated product", "csl:4x4,cannon"), ("tile/language/mbarrier", "llvm"),
    ("graph/found/scattered-lanes-f32", "csl:2x3"), ("graph/flow/branching-f32", "ptx"),
    ("graph/flow/counted-f32", "ptx"), ("graph/launches/grad/stdlib/cross-entropy-f32", "csl:2x3"),
    ("tile/spec/8.3-warp", "ptx"), ("graph/shape/argsort", "ptx"), ("graph/shape/argsort", "csl:2x2"),
    ("tile/atomics/tickets", "ptx"),
    ("tile/language/inline", "ptx"), ("tile/language/stretches", "ptx"), ("tile/language/assertion", "ptx"),
    ("tile/language/print-tiles", "ptx"), ("tile/debug/M5-turned-at-once-repaired", "ptx"),
    ("thin product", "ptx"), ("exchange", "llvm"), ("solutions", "ptx"),
)  # fmt: skip


def _ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


BF16 = ts.bf16.numpy
# Programs with ops that no small case has.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "product": (lambda x, y: x @ y, (_ones(256, 256, dtype=BF16),) * 2),
    "large product": (lambda x, y: x @ y, (_ones(1024, 512, dtype=BF16), _ones(512, 1024, dtype=BF16))),
    "mixed product": (lambda x, y: ts.cast(x, dtype=ts.f32) @ y, (_ones(256, 256, dtype=BF16), _ones(256, 256))),
    "thin product": (lambda x, y: x @ y, (_ones(32, 4096), _ones(4096, 4096))),
    "rotated product": (lambda x, y: x @ y, (_ones(256, 256),) * 2),
    "attention": (
        lambda q: ts.scaled_dot_product_attention(q, q, q, causal=True), (_ones(1, 2, 512, 64, dtype=BF16),),
    ),
    "solution": (lambda x: ts.solve(x, x), (np.eye(2, dtype=np.float32),)),
    "solutions": (lambda x, y: ts.solve(x, y), (_ones(16, 8, 8), _ones(16, 8, 1))),
    "long sort": (lambda x: ts.sort(x), (_ones(2, 5000),)),
    "neighbours": (lambda x: ts.mesh_shift(x, axis=0, shift=1), (_ones(8, 8),)),
    "steps": (lambda x: ts.scan(lambda c, v: (c + v, c), ts.zeros(6), x)[1], (_ones(5, 6),)),
    "exchange": (lambda x, y: ts.all_reduce(ts.exp(x)) + ts.sum(x @ y, axis=1, keepdims=True), (_ones(8, 8),) * 2),
}  # fmt: skip
ON_RANKS = ("exchange",)  # programs of each of two ranks
PAGES: dict[str, tuple[str, ...]] = {
    "schedule.md": ("host", "schedule"),
    "tile.md": ("tile", "mesh"),
    "target.md": ("grouped", "ptx"),
}
# Ops without a use in these programs, and why.
WITHOUT_USE: dict[str, str] = {
    "tile.grid_size": "made for stochastic rounding in grids of rank 2",
    "tile.group_size": "a constant in every specialised kernel",
    "tile.line": "in kernels compiled for stepping alone",
    "tile.pause": "in kernels compiled for stepping alone",
    "mesh.arrived": "in products whose panels travel during the arithmetic",
    "mesh.begin_broadcast": "in products whose panels travel during the arithmetic",
    "mesh.begin_rotate": "in products whose panels travel during the arithmetic",
    "ptx.prefetched_load": "in persistent kernels of many long rows",
    "ptx.unpack_pairs": "in the meaning of `ptx.async_mma`",
}
HEAD = """
## The ops of {dialect}

For each op: its operands (`O`), attributes (`A`), types in one use (`T`), the scopes in which it is legal (`L`) and, if
it has any, its effects (`E`): such an op stays although nothing uses its results, unless it reads alone. A module with
another number or kind of operands, other attributes, other result types or another scope is refused (V2, V7, V2, V3).
"""


@cache
def find_all_cases() -> dict[str, Case]:
    """The conformance cases by name."""
    return {case.name: case for case in all_cases()}


def _prepare_source(name: str, target: str) -> PreparedProgram:
    if name in PROGRAMS:
        function, arrays = PROGRAMS[name]
        if name not in ON_RANKS:
            return prepare(ts.jit(function), arrays, target)
        find = ts.spmd(lambda: prepare(ts.jit(function), arrays, target), mesh=ts.Mesh(2), out_specs="ranks")
        return find()[0]
    case = find_all_cases()[name]
    entry, arguments = case.entry()
    return prepare(entry, arguments, target, case.grid, case.group, dynamic=case.dynamic)


def list_modules(name: str, target: str) -> Iterator[Module]:
    """The modules of a case on its way to a target: of each level, and after each pass of the target."""
    with contextlib.redirect_stdout(io.StringIO()):
        program = _prepare_source(name, target)
    yield from program.levels.values()
    module = program.levels.get("tile")
    if target in ("llvm", "ptx") and module is not None:
        for each in list_target_passes(target, module, {"arch": "sm_90a"} if target == "ptx" else {}):
            module = each.run(module)
            yield module


@cache
def find_uses() -> dict[str, tuple[Module, Function, Node]]:
    """The first use of each op in the modules of SOURCES."""
    found: dict[str, tuple[Module, Function, Node]] = {}
    for name, target in SOURCES:
        for module in list_modules(name, target):
            for function in module.functions:
                for node in function.body.walk():
                    found.setdefault(node.op.name, (module, function, node))
    return found


def list_ops(dialect: str) -> list[Op]:
    """The ops of a dialect, by name."""
    get_backend("llvm"), get_backend("ptx")  # they define the ops of their levels
    return [op for name, op in sorted({**REGISTRY, **TARGET_OPS}.items()) if name.startswith(f"{dialect}.")]


def list_scopes() -> dict[str, LegalityScope]:
    """Every scope of every level by name."""
    scopes = [s for level in LEVELS.values() for s in (level.entry, level.others, *level.regions.values())]
    return {s.name: s for s in scopes if s is not None and not s.name.startswith(("a wgsl", "a csl"))}


def name_legal_scopes(op: Op) -> list[str]:
    """The scopes in which an op is legal."""
    return sorted(name for name, scope in list_scopes().items() if scope.legal(op))


def describe_types(node: Node) -> str:
    """The types of a use."""
    operands, results = (", ".join(f"`{print_type(v.type)}`" for v in side) for side in (node.args, node.results))
    return f"{operands or 'nothing'} to {results or 'nothing'}"


def describe_op(op: Op) -> list[str]:
    """The section of one op."""
    prose = " ".join((op.__doc__ or "").partition(">>>")[0].split())
    attributes = ", ".join(f"`{k}: {p.annotation}`" for k, p in op.attrs.items())
    lines = [f"### {op.name}", "", prose, ""]
    lines.append(f"- **{op.name}.O** {', '.join(f'`{name}`' for name in op.operands) or 'None'}.")
    lines.append(f"- **{op.name}.A** {attributes or 'None'}.")
    if op.name in WITHOUT_USE:
        lines.append(f"- **{op.name}.T** Those of its type rule; it is {WITHOUT_USE[op.name]}.")
    else:
        lines.append(f"- **{op.name}.T** {describe_types(find_uses()[op.name][2])}.")
    lines.append(f"- **{op.name}.L** In {', '.join(name_legal_scopes(op))}.")
    if op.effects:
        stays = "" if has_effect(make_bare_node(op)) else "; it may be removed"
        lines.append(f"- **{op.name}.E** {', '.join(sorted(op.effects))}{stays}.")
    return [*lines, ""]


def make_bare_node(op: Op) -> Node:
    """A node of an op without operands: enough for a question about its effects."""
    return Node(op, (), Attrs({k: None for k in op.attrs}), ())


def make_list(page: str) -> str:
    """The generated part of a page."""
    lines: list[str] = []
    for dialect in PAGES[page]:
        lines += [HEAD.format(dialect=dialect).rstrip(), ""]
        for op in list_ops(dialect):
            lines += describe_op(op)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Write the lists, or check them."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--check", action="store_true")
    check = options.parse_args().check
    for page in PAGES:
        head, mark, old = (FOLDER / page).read_text().partition(MARK)
        if check and (not mark or old != make_list(page)):
            return 1
        if not check:
            (FOLDER / page).write_text(head.rstrip() + "\n\n" + MARK + make_list(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
