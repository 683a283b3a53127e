"""Block types: static shapes and element types of the values of a tile function."""

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

# Block types: static shapes and element types of the values of a tile function.


def static_shape(type: Type) -> tuple[int, ...]:
    """The shape of a block or of memory, which has no symbolic sizes."""
    return tuple(int(n) for n in type.shape)  # type: ignore[arg-type]


def get_tensor_type(v: Value) -> TensorType:
    """The type of a block or scalar."""
    assert isinstance(v.type, TensorType)
    return v.type


def check_element_types(module: Module, target: str, dtypes: Sequence[DType]) -> None:
    """Refuse a Tile module with element types that a target does not support.

    Raises:
        UnsupportedOpError: names the first op of a tile function with such an operand or result.
    """
    for function in module.functions[1:]:
        for node in function.body.walk():
            missing = [t.dtype for t in (*node.result_types, *node.types) if t.dtype not in dtypes]
            if missing:
                raise _make_element_type_error(node, missing[0], target, dtypes)


def _make_element_type_error(node: Node, dtype: DType, target: str, dtypes: Sequence[DType]) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{node.op.name} on {dtype} cannot be emitted: the target {target} has no element type {dtype}",
        location=node.loc,
        expected=", ".join(map(str, dtypes)),
        received=str(dtype),
        suggestion="cast to one of these first, or run in the interpreter",
    )


DEFAULT_POLICY = {"rounding": "nearest", "saturate": False, "denormals": "preserve"}


def is_special_policy(policy: Policy | None) -> bool:
    """Whether a policy has other rounding, saturation or denormal handling than the default."""
    return policy is not None and any(getattr(policy, k) != known for k, known in DEFAULT_POLICY.items())


def make_policy_error(target: str, text: str, location: Location) -> UnsupportedOpError:
    """The error for a policy that a target does not support."""
    return UnsupportedOpError(
        f"the target {target} does not round by the policy {text}", location=location,
        expected="nearest-even, denormals preserved", suggestion="run this in the interpreter, or remove the clause",
    )  # fmt: skip


def check_default_policy(node: Node, target: str) -> None:
    """Refuse an op whose result has a storage policy other than the default.

    Raises:
        UnsupportedOpError: a result's policy asks for another rounding, saturation or flushed denormals.
    """
    for v in node.results:
        policy = getattr(v.type, "policy", None)
        unsupported = [
            f"{k}={getattr(policy, k)}" for k, known in DEFAULT_POLICY.items() if policy and getattr(policy, k) != known
        ]
        if unsupported:
            raise make_policy_error(target, ", ".join(unsupported), node.loc)


@dataclass(frozen=True)
class ResourceUsage:
    """The resources of one group of a kernel: tiles, bytes of shared memory, and peak bytes of a tile's live blocks.

    `peak_location` is where the peak is. A value is live from its definition to its last use; scalars and register
    buffers count too.
    """

    group: int
    shared_bytes: int
    block_bytes: int
    peak_location: Location


def measure_resources(function: Function) -> ResourceUsage:
    """The resources of a tile function, computed from its ops."""
    buffers = [n for n in function.body.walk() if n.op is tile.alloc]
    shared = sum(count_allocation_bytes(n) for n in buffers if n.attrs["space"] == SHARED)
    own = sum(count_allocation_bytes(n) for n in buffers if n.attrs["space"] != SHARED)
    peak, node = _find_peak(function.body)
    return ResourceUsage(int(function.attrs.get("group", 1)), shared, own + peak, node.loc if node else function.loc)


def count_allocation_bytes(node: Node) -> int:
    """The bytes of an allocation, with the padding of its rows."""
    shape = [int(n) for n in node.out.type.shape]
    rows = [*shape[:-1], shape[-1] + node.attrs["padding"]] if shape else []
    return math.ceil(math.prod(rows) * node.out.type.dtype.bits / 8)


def check_resources(module: Module, target: str, capabilities: Capabilities) -> None:
    """Refuse a Tile module whose kernels need more resources than a target has.

    Raises:
        ResourceError: names the kernel, the resource, the amount needed and the limit.
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
        ("bytes of blocks in registers", need.block_bytes, capabilities.block_bytes, "smaller tiles",
         need.peak_location),
    )  # fmt: skip
    for what, amount, limit, remedy, location in limits:
        if limit is not None and amount > limit:
            raise ResourceError(
                f"{function.name} needs {amount:,} {what}", location=location,
                expected=f"at most {limit:,} on {target}",
                received=f"{amount:,}", suggestion=remedy,
            )  # fmt: skip


def _check_grid_barrier(function: Function, target: str, capabilities: Capabilities) -> None:
    """All programs of a grid with a grid barrier must be resident at once."""
    barrier = next((n for n in function.body.walk() if n.op is tile.grid_barrier), None)
    if barrier is None:
        return
    if not capabilities.meeting:
        raise UnsupportedOpError(
            f"the target {target} has no grid barrier", location=barrier.loc,
            suggestion="order the accesses by two launches, one after the other",
        )  # fmt: skip
    programs = math.prod(int(n) for n in function.attrs.get("grid", ()))
    if programs > capabilities.meeting:
        raise ResourceError(
            f"{function.name} has {programs:,} programs that synchronise at a grid barrier", location=barrier.loc,
            expected=f"at most {capabilities.meeting:,} on {target}: all must be resident at once",
            received=f"{programs:,}",
            suggestion="launch fewer programs that loop: for i in tile.range(tile.group_id(), n, programs)",
        )  # fmt: skip


def _find_peak(block: Block) -> tuple[int, Node | None]:
    """The peak bytes of live values in a block, and the node where it is."""
    last = _find_last_uses(block)
    alive = {v: _count_value_bytes(v.type) for v in block.params}
    peak, peak_node = sum(alive.values()), None
    for index, node in enumerate(block.nodes):
        deepest, at = _find_peak_in_regions(node, {v: n for v, n in alive.items() if last.get(v, -1) > index})
        alive |= {v: _count_value_bytes(v.type) for v in node.results}
        peak_here = max(deepest, sum(alive.values()) if not node.regions else 0)
        if peak_here > peak:
            peak, peak_node = peak_here, at or node
        alive = {v: size for v, size in alive.items() if last.get(v, -1) > index}
    return peak, peak_node


def _find_peak_in_regions(node: Node, after: dict[Value, int]) -> tuple[int, Node | None]:
    """The peak in the regions of a node: values live after it, values that they use from outside, and their own."""
    peak_point: tuple[int, Node | None] = (0, None)
    for region in node.regions:
        outer = after | {v: _count_value_bytes(v.type) for v in region.free}
        peak, at = _find_peak(region)
        peak_point = max(peak_point, (sum(outer.values()) + peak, at), key=lambda each: each[0])
    return peak_point


def _find_last_uses(block: Block) -> dict[Value, int]:
    """The index of the last node that uses each value, itself or in its regions; results are used at the end."""
    last: dict[Value, int] = {}
    for index, node in enumerate(block.nodes):
        last |= dict.fromkeys((*node.args, *(v for region in node.regions for v in region.free)), index)
    return last | dict.fromkeys(block.results, len(block.nodes))


def _count_value_bytes(type: Type) -> int:
    """The bytes of a value; 0 for a ref, whose memory is counted at its allocation."""
    return _count_tensor_bytes(type) if isinstance(type, TensorType) else 0


def _count_tensor_bytes(type: Any) -> int:
    return math.ceil(math.prod(map(int, type.shape)) * type.dtype.bits / 8)
