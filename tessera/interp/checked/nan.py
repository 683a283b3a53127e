"""NaN and infinity sentinels: the first op that makes one out of finite operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tessera.interp.checked.monitor import Monitor
from tessera.interp.checked.report import Finding
from tessera.interp.machine import Machine
from tessera.interp.memory import expand
from tessera.ir.core import Node
from tessera.ops import basic
from tessera.types import TensorType


def watch(monitor: Monitor, machine: Machine, node: Node, args: list[Any], results: Sequence[Any]) -> None:
    """Report results that are not finite where all operands were; a constant that says so is meant."""
    if node.regions or node.op is basic.full:
        return
    for value, array in zip(node.results, results, strict=True):
        if isinstance(value.type, TensorType) and value.type.dtype.is_float:
            bad = ~_finite(array)
            if bad.any():
                _report(monitor, machine, node, array, bad & _sound(machine, node, args, bad))


def _finite(array: np.ndarray) -> np.ndarray:
    return np.isfinite(array.astype(np.float32) if array.dtype.kind == "V" else array)


def _sound(machine: Machine, node: Node, args: list[Any], bad: np.ndarray) -> Any:
    """Where all float operands are finite: element by element if the op is so, else for a whole instance."""
    found: Any = True
    floats = [
        a for a, v in zip(args, node.args, strict=True) if isinstance(v.type, TensorType) and v.type.dtype.is_float
    ]
    for array in floats:
        good: Any = _finite(array)
        if not node.op.pointwise:
            good = expand(good.all(axis=tuple(range(machine.rank, good.ndim))), bad.ndim - machine.rank)
        found = found & good
    return found if machine.active is None else found & expand(machine.active, bad.ndim - machine.rank)


def _report(monitor: Monitor, machine: Machine, node: Node, array: np.ndarray, wrong: Any) -> None:
    wrong = np.asarray(wrong)
    if not wrong.any():
        return
    lane = tuple(int(i) for i in np.argwhere(wrong)[0])
    assert monitor.chunk is not None
    who = monitor.chunk.view(monitor.chunk.who, machine)[lane[: machine.rank]]
    held = np.broadcast_to(array, wrong.shape)[lane]
    message = (
        f"{node.op.name} makes {float(held)} of finite operands: "
        f"{monitor.name(int(who))}, element {lane[machine.rank :]} of its result"
    )
    monitor.found(Finding("non-finite", message, node.loc))
