"""Op coverage: the rows by which a target emits the ops of the Tile level, and the ops that it refuses, with reasons.

Every op that is legal in a tile function and has no lowering needs one of the two (`tests/ops/test_complete.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tessera.core.errors import UnsupportedOpError
from tessera.ir.core import Node
from tessera.ir.levels import LEVELS
from tessera.ir.rules import REGISTRY, Op, Rules, lower

# Mesh ops appear only in modules that are lowered for a grid of processing elements (`Capabilities.plan`).
MESH_OPS_REASON = "it moves data between processing elements, which only a target with a mesh has"


def list_required_ops() -> list[Op]:
    """The ops that a target must emit or refuse: those legal in a tile function that have no lowering."""
    scope = LEVELS["tile"].others
    assert scope is not None
    return [op for op in REGISTRY.values() if scope.legal(op) and op not in lower]


def list_mesh_ops() -> list[Op]:
    """The ops of the mesh dialect."""
    return [op for op in REGISTRY.values() if op.name.startswith("mesh.")]


@dataclass(frozen=True)
class OpCoverage:
    """The emission tables of a target, the tables of its passes that rewrite ops into others, and its refusals: from
    an op to the reason why the target has no row for it."""

    tables: tuple[Rules, ...]
    refused: Mapping[Op, str]
    rewritten: tuple[Rules, ...] = ()

    def emits(self, op: Op) -> bool:
        """Whether an emission table has a row for the op."""
        return any(op in table for table in self.tables)

    def covers(self, op: Op) -> bool:
        """Whether the op has a row or a refusal, or is rewritten into ops that have."""
        return self.emits(op) or op in self.refused or any(op in table for table in self.rewritten)

    def list_missing(self) -> list[str]:
        """The names of required ops that have neither a row nor a refusal."""
        return sorted(op.name for op in list_required_ops() if not self.covers(op))

    def list_contradictions(self) -> list[str]:
        """The names of ops that are refused although they have a row or no longer need one."""
        required = list_required_ops()
        return sorted(op.name for op in self.refused if self.emits(op) or op not in required)


def make_refusal_error(target: str, node: Node, refused: Mapping[Op, str]) -> UnsupportedOpError:
    """The error for an op without a row: it gives the declared reason, or says that the row is missing."""
    reason = refused.get(node.op, "its emission tables have no row for it")
    suggestion = "run this on another target, or in the interpreter"
    suggestion += "" if node.op in refused else ", or add a row: docs/adding-an-op.md"
    return UnsupportedOpError(
        f"the target {target} cannot emit {node.op.name}: {reason}", location=node.loc,
        suggestion=suggestion,
    )  # fmt: skip
