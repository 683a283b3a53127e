"""Legality checks: what a Tile module asks of a target (element types, rounding policies, resources) and the target
lacks.

Resources of a kernel are counted by liveness: group size, shared memory, and the bytes of blocks alive at the fullest
point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tessera.codegen.contract import Capabilities
from tessera.core.errors import Location, ResourceError, UnsupportedOpError
from tessera.core.types import SHARED, DType, Policy, TensorType, Type
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ops.dialects import tile

# The check of element types before emission: what a target lacks is named with the op and its line.


def check_element_types(module: Module, target: str, dtypes: Sequence[DType]) -> None:
    """Refuse a Tile module that uses element types a target does not have.

    Raises:
        UnsupportedOpError: the first op of a tile function that takes or gives such elements.
    """
    for function in module.functions[1:]:
        for node in function.body.walk():
            lacking = [t.dtype for t in (*node.result_types, *node.types) if t.dtype not in dtypes]
            if lacking:
                raise _element_type_error(node, lacking[0], target, dtypes)


def _element_type_error(node: Node, dtype: DType, target: str, dtypes: Sequence[DType]) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{node.op.name} on {dtype} cannot be emitted: the target {target} has no element type {dtype}",
        location=node.loc,
        expected=", ".join(map(str, dtypes)),
        received=str(dtype),
        suggestion="cast to one of these before, or run in the interpreter",
    )


# Policies that store otherwise than by nearest-even: which those are, and what generators without them say.


DEFAULT_POLICY = {"rounding": "nearest", "saturate": False, "denormals": "preserve"}


def is_special_policy(policy: Policy | None) -> bool:
    """Whether a policy stores otherwise than by nearest-even."""
    return policy is not None and any(getattr(policy, k) != known for k, known in DEFAULT_POLICY.items())


def make_policy_error(target: str, text: str, location: Location) -> UnsupportedOpError:
    """The error for a policy that a target does not have."""
    return UnsupportedOpError(
        f"the target {target} does not round by the policy {text}", location=location,
        expected="nearest-even, denormals preserved", suggestion="run this in the interpreter, or leave the clause out",
    )  # fmt: skip


def check_default_policy(node: Node, target: str) -> None:
    """Refuse an op whose results a policy rounds otherwise than to nearest even.

    Raises:
        UnsupportedOpError: a result's policy asks for another rounding, saturation or flushed denormals.
    """
    for v in node.results:
        policy = getattr(v.type, "policy", None)
        wrong = [
            f"{k}={getattr(policy, k)}" for k, known in DEFAULT_POLICY.items() if policy and getattr(policy, k) != known
        ]
        if wrong:
            raise make_policy_error(target, ", ".join(wrong), node.loc)


# What a kernel needs of a target's group: tiles, shared memory, blocks in registers; refused before it is emitted.


@dataclass(frozen=True)
class ResourceUsage:
    """What one group of a kernel needs: tiles, bytes of shared memory, and the bytes of the blocks that one tile
    holds at its fullest point, with that point.

    The last counts values from their definition to their last use; scalars and register buffers count too.
    """

    group: int
    shared_bytes: int
    block_bytes: int
    fullest: Location


def measure_resources(function: Function) -> ResourceUsage:
    """What a tile function needs, counted from its ops."""
    buffers = [n for n in function.body.walk() if n.op is tile.alloc]
    shared = sum(count_allocation_bytes(n) for n in buffers if n.attrs["space"] == SHARED)
    own = sum(count_allocation_bytes(n) for n in buffers if n.attrs["space"] != SHARED)
    peak, node = _find_peak(function.body)
    return ResourceUsage(int(function.attrs.get("group", 1)), shared, own + peak, node.loc if node else function.loc)


def count_allocation_bytes(node: Node) -> int:
    """The bytes that an allocation takes, with the elements left unused after each row."""
    shape = [int(n) for n in node.out.type.shape]
    rows = [*shape[:-1], shape[-1] + node.attrs["padding"]] if shape else []
    return math.ceil(math.prod(rows) * node.out.type.dtype.bits / 8)


def check_resources(module: Module, target: str, capabilities: Capabilities) -> None:
    """Refuse a Tile module whose kernels need more than a target has.

    Raises:
        ResourceError: it names the kernel, the resource, what is needed and what there is.
    """
    for function in module.functions:
        if function is not module.main:
            _check_limits(function, target, capabilities)
            _check_grid_barrier(function, target, capabilities)


def _check_limits(function: Function, target: str, capabilities: Capabilities) -> None:
    need = measure_resources(function)
    limits = (
        ("tiles in a group", need.group, capabilities.max_group, "a smaller group, or fewer warps", function.loc),
        ("bytes of shared memory", need.shared_bytes, capabilities.shared_bytes, "smaller tiles, or fewer stages",
         function.loc),
        ("bytes of blocks in registers", need.block_bytes, capabilities.block_bytes, "smaller tiles", need.fullest),
    )  # fmt: skip
    for what, wanted, limit, remedy, place in limits:
        if limit is not None and wanted > limit:
            raise ResourceError(
                f"{function.name} needs {wanted:,} {what}", location=place, expected=f"at most {limit:,} on {target}",
                received=f"{wanted:,}", suggestion=remedy,
            )  # fmt: skip


def _check_grid_barrier(function: Function, target: str, capabilities: Capabilities) -> None:
    """A grid whose programs wait for each other must be under way whole."""
    found = next((n for n in function.body.walk() if n.op is tile.grid_barrier), None)
    if found is None:
        return
    if not capabilities.meeting:
        raise UnsupportedOpError(
            f"the target {target} has no barrier of a whole grid", location=found.loc,
            suggestion="two launches, one after the other, order the same accesses",
        )  # fmt: skip
    programs = math.prod(int(n) for n in function.attrs.get("grid", ()))
    if programs > capabilities.meeting:
        raise ResourceError(
            f"{function.name} has {programs:,} programs that synchronise at a grid barrier", location=found.loc,
            expected=f"at most {capabilities.meeting:,} on {target}: they must all run at once",
            received=f"{programs:,}",
            suggestion="fewer programs that do more each: for i in tile.range(tile.group_id(), n, programs)",
        )  # fmt: skip


def _find_peak(block: Block) -> tuple[int, Node | None]:
    """The most bytes of values alive at once in a block, and the node where that is."""
    last = _find_last_uses(block)
    alive = {v: _count_value_bytes(v.type) for v in block.params}
    peak, fullest = sum(alive.values()), None
    for place, node in enumerate(block.nodes):
        deepest, at = _find_peak_in_regions(node, {v: n for v, n in alive.items() if last.get(v, -1) > place})
        alive |= {v: _count_value_bytes(v.type) for v in node.results}
        most = max(deepest, sum(alive.values()) if not node.regions else 0)
        if most > peak:
            peak, fullest = most, at or node
        alive = {v: size for v, size in alive.items() if last.get(v, -1) > place}
    return peak, fullest


def _find_peak_in_regions(node: Node, after: dict[Value, int]) -> tuple[int, Node | None]:
    """The fullest point in the regions of a node: what lives on after it, what they use from outside, and their own."""
    found: tuple[int, Node | None] = (0, None)
    for region in node.regions:
        outer = after | {v: _count_value_bytes(v.type) for v in region.free}
        peak, at = _find_peak(region)
        found = max(found, (sum(outer.values()) + peak, at), key=lambda each: each[0])
    return found


def _find_last_uses(block: Block) -> dict[Value, int]:
    """The last node of a block that uses each value, itself or in its regions; results are used at the end."""
    last: dict[Value, int] = {}
    for place, node in enumerate(block.nodes):
        last |= dict.fromkeys((*node.args, *(v for region in node.regions for v in region.free)), place)
    return last | dict.fromkeys(block.results, len(block.nodes))


def _count_value_bytes(type: Type) -> int:
    """The bytes of a value; a ref has none: memory is counted where it is made."""
    return _count_tensor_bytes(type) if isinstance(type, TensorType) else 0


def _count_tensor_bytes(type: Any) -> int:
    return math.ceil(math.prod(map(int, type.shape)) * type.dtype.bits / 8)
