"""Optimisation passes: constant folding, quantised and pruned weights, and what the compiler's own passes did.

Quantisation is symmetric unless said otherwise: q = clip(round(w / s), -127, 127) with s = max|w| / 127 of each output
(Jacob et al. 2018). A pass leaves a product as it is where it does not fit, and says why.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, UnknownNameError, user_location
from tessera.core.types import as_dtype, f32, fp8_e4m3, int8, int32
from tessera.deploy.constant_program import ConstantProduct, ConstantProgram, ProductRule
from tessera.ir.core import Module
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import host
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import maximum, minimum, mul, round
from tessera.stdlib.quantised import HALF, PACKED_BLOCK, QuantisedMatrix, dequantise, quantised_matmul

INT8_TOP, FP8_TOP = 127, 448.0  # the largest magnitudes: of symmetric int8, and of e4m3
SMALLEST_F16_SCALE = 2.0**-14  # below it, f16 loses digits


@dataclass
class PassRecord:
    """What a pass did: a sentence, and its figures as JSON data."""

    name: str
    summary: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class PassInputs:
    """What passes may read besides the program: the largest magnitude of the operand of each product, if measured."""

    ranges: Mapping[int, float] | None = None


# Steps on the graph of a program with constants.


@dataclass(frozen=True)
class ConstantFolding:
    """Compute what depends on weights alone once, merge equal ops, and remove ops that nothing uses."""

    name = "constant_folding"
    order = 0

    def apply(self, program: ConstantProgram, inputs: PassInputs, record: PassRecord) -> ConstantProgram:
        """The folded program."""
        made = program.rewrite()
        record.figures = {"ops_before": program.nodes, "ops": made.nodes}
        record.summary = f"{program.nodes} ops became {made.nodes}"
        return made


@dataclass
class _Tally:
    """Counts what a rule did to products."""

    changed: int = 0
    left: Counter[str] = field(default_factory=Counter)

    def leave(self, reason: str) -> None:
        self.left[reason] += 1

    def report(self, record: PassRecord, what: str) -> None:
        record.figures |= {"products": self.changed, "left": dict(self.left)}
        record.summary = f"{self.changed} products {what}"
        record.summary += "".join(f"; {n} left as written: {reason}" for reason, n in sorted(self.left.items()))


def quantise_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A matrix [outputs, summed] as int8 and a scale of f32 for each output.

    >>> codes, scale = quantise_rows(np.float32([[1, -0.5]]))
    >>> codes.tolist(), [float(s) for s in (scale * 127).round(6)]
    ([[127, -64]], [1.0])
    """
    scale = _scale(np.max(np.abs(matrix), axis=1, initial=0.0), INT8_TOP)
    codes = np.clip(np.rint(matrix / scale[:, None]), -INT8_TOP, INT8_TOP)
    return codes.astype(np.int8), scale


def _scale(size: np.ndarray, top: float) -> np.ndarray:
    """The scales that map these magnitudes to `top`; 1 / top where all is zero."""
    size = np.asarray(size, np.float32)
    scale = np.where(size == 0, np.float32(1.0), size) / np.float32(top)
    return np.maximum(scale, np.finfo(np.float32).tiny).astype(np.float32)


def quantise_groups(matrix: np.ndarray) -> QuantisedMatrix:
    """A matrix [outputs, summed] in groups of 32 codes of 4 bits: element = code · scale + low, code = 0 … 15.

    Scale and low value are f16, or f32 where f16 would lose digits.

    Raises:
        ArgumentError: the rows are no whole number of groups.
    """
    rows, columns = matrix.shape
    if columns % PACKED_BLOCK or not columns:
        raise ArgumentError(f"rows of {columns} are no whole groups of {PACKED_BLOCK}", location=user_location())
    groups = matrix.astype(np.float32).reshape(rows, -1, PACKED_BLOCK)
    low = groups.min(axis=2)
    scale = (groups.max(axis=2) - low) / np.float32(15)
    store = np.float16 if _fits_f16(scale) and _fits_f16(low) else np.float32
    low, scale = low.astype(store), scale.astype(store)
    step = np.where(scale == 0, 1, scale).astype(np.float32)[:, :, None]
    codes = np.clip(np.rint((groups - low.astype(np.float32)[:, :, None]) / step), 0, 15).astype(np.uint8)
    packed = codes[:, :, :HALF] | codes[:, :, HALF:] << 4
    return QuantisedMatrix(packed.reshape(rows, columns // 2), scale, low)


def _fits_f16(values: np.ndarray) -> bool:
    size = np.abs(values[values != 0])
    return not size.size or bool(size.max() < 65504 and size.min() >= SMALLEST_F16_SCALE)


MatrixRule = Callable[[ConstantProduct], Tensor]


def _make_rule(tally: _Tally, rule: MatrixRule, find_reason: Callable[[ConstantProduct], str]) -> ProductRule:
    """A rule for products of f32; `find_reason` says why one is left, or ""."""

    def apply(product: ConstantProduct) -> Tensor | None:
        plain = as_dtype(product.matrix.dtype) == f32 and product.x.dtype == f32 == product.node.out.type.dtype
        reason = find_reason(product) if plain else "its operands are not f32"
        if plain and not np.isfinite(product.matrix).all():
            reason = "its weights are not all finite"
        if reason or not product.matrix.size:
            tally.leave(reason or "it has no elements")
            return None
        tally.changed += 1
        return rule(product)

    return apply


@dataclass(frozen=True)
class WeightInt8:
    """Weights as int8 with a scale for each output; products are computed in f32, and dequantise as they read."""

    name = "weight_int8"
    order = 2

    def apply(self, program: ConstantProgram, inputs: PassInputs, record: PassRecord) -> ConstantProgram:
        """The program with quantised weights."""
        made: dict[int, QuantisedMatrix] = {}

        def rule(product: ConstantProduct) -> Tensor:
            if id(product.matrix) not in made:
                codes, scale = quantise_rows(product.matrix)
                made[id(product.matrix)] = QuantisedMatrix(Tensor(codes), Tensor(scale[:, None]))
            return multiply_quantised(product, made[id(product.matrix)])

        return _apply_rule(program, record, rule, lambda p: "", "have weights of int8")


@dataclass(frozen=True)
class WeightInt4:
    """Weights of 4 bits in groups of 32 with a scale and a low value; products are computed in f32."""

    name = "weight_int4"
    order = 2

    def apply(self, program: ConstantProgram, inputs: PassInputs, record: PassRecord) -> ConstantProgram:
        """The program with quantised weights."""
        made: dict[int, QuantisedMatrix] = {}

        def rule(product: ConstantProduct) -> Tensor:
            if id(product.matrix) not in made:
                made[id(product.matrix)] = QuantisedMatrix(*map(Tensor, quantise_groups(product.matrix)))
            return multiply_quantised(product, made[id(product.matrix)])

        def find_reason(product: ConstantProduct) -> str:
            return "its rows are no whole groups of 32" if product.matrix.shape[1] % PACKED_BLOCK else ""

        return _apply_rule(program, record, rule, find_reason, "have weights of 4 bits in groups of 32")


def multiply_quantised(product: ConstantProduct, matrix: QuantisedMatrix) -> Tensor:
    """The product with a quantised matrix: on the right by the kernel that decodes it, on the left decoded first."""
    return quantised_matmul(product.x, matrix) if product.right else product.multiply(dequantise(matrix))


@dataclass(frozen=True)
class WeightFp8:
    """Weights as fp8 (e4m3) with a scale for each output; products are computed in f32."""

    name = "weight_fp8"
    order = 2

    def apply(self, program: ConstantProgram, inputs: PassInputs, record: PassRecord) -> ConstantProgram:
        """The program with weights of fp8."""
        made: dict[int, tuple[Tensor, np.ndarray]] = {}

        def rule(product: ConstantProduct) -> Tensor:
            if id(product.matrix) not in made:
                scale = _scale(np.max(np.abs(product.matrix), axis=1, initial=0.0), FP8_TOP)
                narrow = np.clip(product.matrix / scale[:, None], -FP8_TOP, FP8_TOP).astype(fp8_e4m3.numpy)
                made[id(product.matrix)] = Tensor(narrow), scale
            narrow, scale = made[id(product.matrix)]
            return mul(product.multiply(cast(narrow, dtype=f32)), Tensor(product.spread(scale)))

        return _apply_rule(program, record, rule, lambda p: "", "have weights of fp8 (e4m3)")


@dataclass(frozen=True)
class StaticInt8:
    """Weights and activations as int8, products in int32; the scale of activations is fixed by calibration data."""

    name = "static_int8"
    order = 2
    calibrated = True

    def apply(self, program: ConstantProgram, inputs: PassInputs, record: PassRecord) -> ConstantProgram:
        """The program with products of int8."""
        ranges = inputs.ranges
        if ranges is None:
            raise ArgumentError(
                "static_int8 needs data to calibrate on", location=user_location(),
                expected="calibration=[(x,), ...]: arguments as the model gets them",
                suggestion="weight_int8 needs none",
            )  # fmt: skip
        made: dict[int, tuple[Tensor, np.ndarray]] = {}

        def rule(product: ConstantProduct) -> Tensor:
            if id(product.matrix) not in made:
                made[id(product.matrix)] = _wrap_codes(*quantise_rows(product.matrix))
            codes, scale = made[id(product.matrix)]
            step = _scale(np.float32(ranges[product.number]), INT8_TOP)
            levels = round(product.x / float(step))
            x = cast(minimum(maximum(levels, -float(INT8_TOP)), float(INT8_TOP)), dtype=int8)
            whole = product.multiply(codes, int32, x)
            return mul(cast(whole, dtype=f32), Tensor(product.spread(scale * step)))

        def find_reason(product: ConstantProduct) -> str:
            found = ranges.get(product.number)
            if found is None:
                raise ArgumentError("the calibration data took another path than this call", location=user_location())
            if not np.isfinite(found):
                return "its activations are not all finite"
            return "int32 may overflow" if product.matrix.shape[1] > (2**31 - 1) // INT8_TOP**2 else ""

        return _apply_rule(program, record, rule, find_reason, "multiply int8 by int8")


def _wrap_codes(codes: np.ndarray, scale: np.ndarray) -> tuple[Tensor, np.ndarray]:
    return Tensor(codes), scale


def _apply_rule(
    program: ConstantProgram, record: PassRecord, rule: MatrixRule, find_reason: Callable[[ConstantProduct], str],
    what: str,
) -> ConstantProgram:  # fmt: skip
    tally = _Tally()
    made = program.rewrite(_make_rule(tally, rule, find_reason), tally.leave)
    tally.report(record, what)
    record.figures |= {"weight_bytes_before": program.constant_bytes, "weight_bytes": made.constant_bytes}
    return made


# Pruning: the weights stay f32, and zeros are multiplied as other elements are.


def prune_smallest(matrix: np.ndarray, sparsity: float) -> np.ndarray:
    """The matrix with its elements of the least magnitude set to zero: round(sparsity · size) of them.

    >>> prune_smallest(np.float32([[3, -1], [2, -4]]), 0.5)
    array([[ 3.,  0.],
           [ 0., -4.]], dtype=float32)
    """
    count = int(np.rint(sparsity * matrix.size))
    made = matrix.copy().reshape(-1)
    made[np.argsort(np.abs(made), kind="stable")[:count]] = 0
    return made.reshape(matrix.shape)


def prune_groups(matrix: np.ndarray) -> np.ndarray:
    """The matrix with two zeros in every four adjacent elements of a row: those of the least magnitude.

    >>> prune_groups(np.float32([[1, -3, 2, 0.5]]))
    array([[ 0., -3.,  2.,  0.]], dtype=float32)
    """
    groups = matrix.reshape(-1, 4).copy()
    np.put_along_axis(groups, np.argsort(np.abs(groups), axis=1, kind="stable")[:, :2], 0, axis=1)
    return groups.reshape(matrix.shape)


def _prune(
    program: ConstantProgram, record: PassRecord, prune: Callable[[np.ndarray], np.ndarray | None]
) -> ConstantProgram:
    made: dict[int, np.ndarray | None] = {}
    zeros, size, left = 0, 0, 0

    def change(number: int, matrix: np.ndarray) -> np.ndarray | None:
        nonlocal zeros, size, left
        if id(matrix) not in made:
            made[id(matrix)] = found = prune(matrix) if as_dtype(matrix.dtype).is_float else None
            left += found is None
            zeros += 0 if found is None else int((found == 0).sum())
            size += 0 if found is None else found.size
        return made[id(matrix)]

    result = program.replace_matrices(change)
    share = zeros / size if size else 0.0
    record.figures = {"matrices": len(made) - left, "left": left, "zeros": zeros, "sparsity": float(f"{share:.4g}")}
    record.summary = f"{share:.1%} of the elements of {len(made) - left} matrices are zero (stored as they are)"
    record.summary += f"; {left} left as written" if left else ""
    return result


@dataclass(frozen=True)
class MagnitudePruning:
    """Set the elements of least magnitude of each weight matrix to zero: the share `sparsity` of them."""

    sparsity: float = 0.5
    name = "magnitude_pruning"
    order = 1

    def __post_init__(self) -> None:
        number = isinstance(self.sparsity, (int, float)) and not isinstance(self.sparsity, bool)
        if not number or not 0 <= self.sparsity <= 1:
            raise ArgumentError("sparsity is a share", location=user_location(), expected="0 to 1",
                                received=repr(self.sparsity))  # fmt: skip

    def apply(self, program: ConstantProgram, inputs: PassInputs, record: PassRecord) -> ConstantProgram:
        """The pruned program."""
        return _prune(program, record, lambda matrix: prune_smallest(matrix, self.sparsity))


@dataclass(frozen=True)
class StructuredPruning:
    """2:4 sparsity: of every four adjacent elements of a row, the two of least magnitude are zero (Mishra et al. 2021).

    Matrices whose rows are no whole number of fours are left as they are.
    """

    name = "pruning_2_4"
    order = 1

    def apply(self, program: ConstantProgram, inputs: PassInputs, record: PassRecord) -> ConstantProgram:
        """The pruned program."""
        return _prune(program, record, lambda matrix: None if matrix.shape[1] % 4 else prune_groups(matrix))


# Steps of the compiler, which every program goes through: their figures.


@dataclass(frozen=True)
class FusionSummary:
    """The fusion of ops into kernels: every compilation does it; this adds its figures to the report."""

    name = "kernel_fusion"
    order = 3

    def describe(self, levels: Mapping[str, Module], record: PassRecord) -> None:
        """Count ops and kernel launches."""
        ops = sum(1 for _ in levels["graph"].main.body.walk())
        launches = [n for n in levels["tile"].main.body.walk() if n.op is host.launch]
        record.figures = {"ops": ops, "launches": len(launches)}
        record.summary = f"{ops} ops became {len(launches)} kernel launches"


@dataclass(frozen=True)
class MemorySummary:
    """The assignment of intermediate results to one workspace: every compilation does it; this adds its figures."""

    name = "memory_planning"
    order = 3

    def describe(self, levels: Mapping[str, Module], record: PassRecord) -> None:
        """Compare the workspace with the sum of its buffers."""
        main = levels["tile"].main
        found = [n.out.type for n in main.body.walk() if n.op is host.alloc]
        buffers = sum(math.prod(map(int, t.shape)) * t.dtype.numpy.itemsize for t in found)
        workspace = int(main.attrs.get("workspace", buffers))
        record.figures = {"buffers": len(found), "buffer_bytes": buffers, "workspace_bytes": workspace}
        record.summary = f"{len(found)} buffers of {buffers:,} bytes share a workspace of {workspace:,} bytes"


# Names of passes.

PASSES: dict[str, Callable[[], Any]] = {
    p.name: p
    for p in (
        ConstantFolding, WeightInt8, WeightInt4, WeightFp8, StaticInt8, MagnitudePruning, StructuredPruning,
        FusionSummary, MemorySummary,
    )
}  # fmt: skip
ALIASES = {
    "graph_optimization": "constant_folding", "graph_simplification": "constant_folding",
    "layer_fusion": "kernel_fusion", "webgpu_kernels": "kernel_fusion", "memory_minimization": "memory_planning",
    "pruning": "magnitude_pruning",
    "fp8_quantization": "weight_fp8", "quantization_fp8": "weight_fp8",
    "int4_quantization": "weight_int4", "quantization_int4": "weight_int4",
}  # fmt: skip
INT8_ALIASES = ("quantization_int8", "int8_quantization")  # of activations too where there is calibration data


def find_passes(optimizations: Any, calibrated: bool) -> list[Any]:
    """The passes that names and pass objects choose, in the order in which they run: each kind once.

    Raises:
        UnknownNameError: a name is of no pass. ArgumentError: two of them quantise or prune.
    """
    if isinstance(optimizations, (str, bytes)) or not hasattr(optimizations, "__iter__"):
        raise ArgumentError("optimizations is a list", location=user_location(), received=repr(optimizations)[:80])
    found = [_find_pass(each, calibrated) for each in optimizations]
    found = [p for i, p in enumerate(found) if p not in found[:i]]
    for order, what in ((1, "prune"), (2, "quantise")):
        names = [p.name for p in found if p.order == order]
        if len(names) > 1:
            raise ArgumentError(
                f"{len(names)} passes {what} the same weights", location=user_location(), received=", ".join(names),
                expected="one of them",
            )  # fmt: skip
    return sorted(found, key=lambda p: p.order)


def _find_pass(given: Any, calibrated: bool) -> Any:
    if not isinstance(given, str):
        if type(given) not in PASSES.values():
            raise ArgumentError(
                f"{given!r:.80} is no pass", location=user_location(), expected=f"one of {', '.join(PASSES)}"
            )
        return given
    name = ("static_int8" if calibrated else "weight_int8") if given in INT8_ALIASES else ALIASES.get(given, given)
    if name not in PASSES:
        import difflib  # seldom needed

        close = difflib.get_close_matches(given, [*PASSES, *ALIASES, *INT8_ALIASES], 1)
        raise UnknownNameError(
            f'"{given}" is no optimisation', location=user_location(), expected=", ".join(PASSES),
            suggestion=f"did you mean {close[0]}?" if close else None,
        )  # fmt: skip
    return PASSES[name]()
