"""What this generator lacks: the ops of the Tile level that no table has."""

from __future__ import annotations

import tessera.codegen.llvm.module  # fills the tables  # noqa: F401
from tessera.codegen.grouped.rewrite import lift
from tessera.codegen.llvm.element import element
from tessera.codegen.llvm.emit import emit
from tessera.codegen.llvm.visit import visit
from tessera.ir.levels import LEVELS
from tessera.op import REGISTRY, lower


def missing() -> list[str]:
    """The names of ops legal in a tile function with neither a row nor a lowering."""
    functions = LEVELS["tile"].others
    assert functions is not None
    tables = (emit, element, visit, lift, lower)
    return sorted(o.name for o in REGISTRY.values() if functions.legal(o) and not any(o in t for t in tables))
