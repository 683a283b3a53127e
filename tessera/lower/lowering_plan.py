"""Lowering plan: the tile sizes and limits that a target sets, and the ops that it computes with hand-written
kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tessera.core.hooks import load_library_launches
from tessera.ir.core import Function, Node
from tessera.ir.rules import Op, Rules

# Plan: the tile sizes and limits that a target wants.


@dataclass(frozen=True)
class LoweringPlan:
    """What a target asks of the lowering; the defaults suit a CPU with a few threads.

    `rows` and `pointwise` count the elements that one program holds in a row kernel and in an elementwise
    one; a row longer than `row_limit` is walked by a loop, and so is a contraction longer than `whole_k`.
    """

    m: int = 128
    n: int = 128
    k: int = 512
    busy_n: int | None = None  # like n, for products whose results go through functions at once; None: n
    whole_k: int = 512
    multiple: int = 16
    rows: int = 8192
    row_limit: int = 8192
    pointwise: int = 8192
    lanes: int = 64
    programs: int = 8
    # Longer axes than this are sorted by the host; None: never, the lowering compares all pairs.
    host_sort: int | None = None
    flash: bool = True
    flash_m: int = 32
    flash_n: int = 64
    flash_deep: int | None = None  # rows and columns instead of both for heads of 64 or 128 features; None: the same
    mesh: tuple[int, int] | None = None  # rows and columns of elements, each with its own memory
    mesh_product: str = "summa"  # or "cannon": how pieces of matrices that must meet are multiplied there


# Ops that a tile function written by hand computes as a whole: what it is, its grid, and how it sees its operands.


@dataclass(frozen=True)
class LibraryLaunch:
    """A tile function, its grid, and the shapes its operands and result are seen as."""

    function: Function
    grid: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]


# rule(node, plan) gives the launch for a node, or None where its lowering must do.
library_rules = Rules("launch")
LibraryRule = Callable[[Node, LoweringPlan], "LibraryLaunch | None"]


def find_library_ops(plan: LoweringPlan) -> frozenset[Op]:
    """The ops that this plan launches."""
    return frozenset(load_library_launches()) if plan.flash else frozenset()


def find_library_launch(node: Node, plan: LoweringPlan) -> LibraryLaunch | None:
    """How a node is launched, if it is."""
    rule = load_library_launches().get(node.op) if plan.flash else None
    return rule(node, plan) if rule else None
