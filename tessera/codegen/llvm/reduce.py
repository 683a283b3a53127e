"""Reductions: sums, extremes and their places, by vector accumulators combined in a fixed order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tessera.codegen.llvm import convert
from tessera.codegen.llvm.element import apply, value_at, widened
from tessera.codegen.llvm.emit import Spot, emit
from tessera.codegen.llvm.lane import ZERO, Body, Index, Kind, Lane
from tessera.codegen.llvm.memory import store
from tessera.codegen.llvm.nest import lanes_for, nest, ramped, stretches, walk
from tessera.codegen.llvm.scratch import Memory, fit
from tessera.codegen.llvm.text import Loop
from tessera.codegen.llvm.types import Vec, register
from tessera.codegen.llvm.visit import visit
from tessera.ir.core import Node, Value
from tessera.ops import elementwise, reduce
from tessera.types import DType, f32, int64

if TYPE_CHECKING:
    from tessera.codegen.llvm.kernel import Kernel
