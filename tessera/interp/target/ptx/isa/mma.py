"""Warp-level matrix instructions: fragment layouts, mma, mma.sp, ldmatrix, stmatrix, movmatrix and wmma.

Layouts are those of the PTX ISA, "Matrix fragments for mma"; the layout of wmma fragments is unspecified there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np

from tessera.core.errors import ExecutionError
from tessera.interp.target.ptx.isa.addressing import (
    AddressOperandReader,
    decode_address,
    require_known_modifiers,
    resolve_accesses,
)
from tessera.interp.target.ptx.isa.data_movement import record_access
from tessera.interp.target.ptx.isa.decoder import CONTROL_RULES, PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.operands import Reader, Writer, get_vector_parts, make_constant_reader
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import PtxFault
from tessera.interp.target.ptx.machine.simt import DecodedInstruction, PtxMachine, is_whole_thread_groups
from tessera.interp.target.ptx.text.syntax import TYPES, ImmediateOperand, PtxInstruction, PtxOperand, PtxType

# Fragment layouts, and the arithmetic of tensor cores on whole matrices.


_TF32 = np.uint32(0xFFFFE000)


@lru_cache(maxsize=256)
def make_a_fragment_layout(rows: int, depth: int, elements_per_register: int) -> np.ndarray:
    """For each element [rows, depth] of A its slot: lane * elements of a lane + element.

    A register of a lane has `elements_per_register` neighbours along the depth; successive registers are 8 rows apart,
    then along the depth. (PTX ISA, "Matrix fragments for mma.m16n8k16"; the other shapes are alike.)
    """
    r, k = np.meshgrid(np.arange(rows), np.arange(depth), indexing="ij")
    warp, r = divmod(r, 16) if rows == 64 else (0, r)
    halves = min(rows, 16) // 8
    register = r // 8 + halves * (k // (4 * elements_per_register))
    lane = 32 * warp + r % 8 * 4 + k % (4 * elements_per_register) // elements_per_register
    return (lane * (halves * depth // 4) + register * elements_per_register + k % elements_per_register).reshape(-1)


@lru_cache(maxsize=256)
def make_b_fragment_layout(depth: int, elements_per_register: int) -> np.ndarray:
    """For each element [depth, 8] of B its slot."""
    k, c = np.meshgrid(np.arange(depth), np.arange(8), indexing="ij")
    lane = c * 4 + k % (4 * elements_per_register) // elements_per_register
    return (
        lane * (depth // 4) + k // (4 * elements_per_register) * elements_per_register + k % elements_per_register
    ).reshape(-1)


@lru_cache(maxsize=256)
def make_accumulator_layout(rows: int, columns: int) -> np.ndarray:
    """For each slot of C or D its element [rows, columns]: pairs of columns, 8 rows apart, then 8 columns apart."""
    lanes, halves = 2 * max(rows, 16) if rows == 64 else 32, min(rows, 16) // 8
    lane, i = np.meshgrid(np.arange(lanes), np.arange(rows * columns // lanes), indexing="ij")
    row = 16 * (lane // 32) + lane % 32 // 4 + 8 * (i // 2 % halves)
    column = 8 * (i // (2 * halves)) + lane % 4 * 2 + i % 2
    return (row * columns + column).reshape(-1)


def gather_registers(m: PtxMachine, lanes: LaneSet, readers: list[Reader], group_size: int = 32) -> np.ndarray:
    """The registers of whole thread groups as [groups, group size, registers]."""
    if (
        not (is_whole_thread_groups(lanes, group_size) and lanes.shape[1] % group_size == 0)
        and lanes.count % group_size
    ):
        raise PtxFault(f"needs whole groups of {group_size} threads", ExecutionError, int(lanes.flat[0]))
    result = [lanes.compress(r(m, lanes)) for r in readers]
    return np.stack(result, axis=-1).reshape(-1, group_size, len(readers))


def scatter_registers(m: PtxMachine, lanes: LaneSet, writers: list[Writer], values: np.ndarray) -> None:
    """The inverse of `gather_registers`."""
    flat = np.ascontiguousarray(values.reshape(lanes.count, len(writers)).T)
    for k, write in enumerate(writers):
        write(m, lanes, lanes.expand(flat[k]))


def convert_fragment_to_matrix(
    registers: np.ndarray, t: PtxType, order: np.ndarray, rows: int, columns: int
) -> np.ndarray:
    """The matrices [groups, rows, columns] of fragments in registers, as float32 (f64 as it is)."""
    if t.bits < 8:
        elements = _unpack_bits(np.ascontiguousarray(registers), t.bits)
    else:
        elements = np.ascontiguousarray(registers).view(get_storage_dtype(t)).reshape(len(registers), -1)
    return widen_elements(elements[:, order].reshape(-1, rows, columns), t)


def _unpack_bits(registers: np.ndarray, bits: int) -> np.ndarray:
    """The elements of 1 or 4 bits in registers [groups, lanes, registers], the lowest first, as bytes."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    mask = np.uint32((1 << bits) - 1)
    return (registers[..., None] >> shifts & mask).astype(np.uint8).reshape(len(registers), -1)


def get_storage_dtype(t: PtxType) -> np.dtype:
    """The unsigned dtype that stores elements of a type."""
    return np.dtype(f"u{t.dtype.itemsize}")


def widen_elements(raw: np.ndarray, t: PtxType) -> np.ndarray:
    """Elements of a narrow type as float32, which is exact; doubles are unchanged."""
    return _WIDEN.get(t.name, lambda x: x.view(t.dtype).astype(np.float32))(raw)


_EIGHT = {
    "e4m3": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "e5m2": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float32),
}
_WIDEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bf16": lambda x: (x.astype(np.uint32) << np.uint32(16)).view(np.float32),
    "tf32": lambda x: (x & _TF32).view(np.float32),
    "e4m3": lambda x: _EIGHT["e4m3"][x],
    "e5m2": lambda x: _EIGHT["e5m2"][x],
    "f64": lambda x: x.view(np.float64),
    "s4": lambda x: (x.astype(np.int8) ^ np.int8(8)).astype(np.float32) - np.float32(8),
}
# Integers of 4 bits and 1 bit, which matrix instructions alone have.
NARROW_TYPES = {
    "s4": PtxType("s4", np.dtype(np.int8), 4, "s"),
    "u4": PtxType("u4", np.dtype(np.uint8), 4, "u"),
    "b1": PtxType("b1", np.dtype(np.uint8), 1, "u"),
}


def add_to_accumulator(product: np.ndarray, addend: np.ndarray, t: PtxType, saturate: bool) -> np.ndarray:
    """Matrix products added to accumulators of a type.

    The order and width of a tensor core's sum are unspecified; here it is a float32 sum.
    """
    if t.kind == "f":
        wide = np.float64 if t.name == "f64" else np.float32
        return (product.astype(wide) + addend.astype(wide)).astype(t.dtype)
    total = product.astype(np.int64) + addend
    limits = np.iinfo(np.int32)
    return (np.clip(total, limits.min, limits.max) if saturate else total).astype(np.uint32).view(np.int32)


# mma.m8n8k4 on f16: four products of a warp, each of eight lanes.


# The lanes of each product (a quad pair): 4q to 4q + 3, and those 16 above.
_QUAD_PAIR_LANES = np.array([[4 * q + lane % 4 + 16 * (lane // 4) for lane in range(8)] for q in range(4)])


@lru_cache(maxsize=8)
def _make_quad_operand_layout(transposed: bool) -> np.ndarray:
    """For each element [8, 4] of A (or of B transposed) its slot among eight lanes of four elements.

    (PTX ISA, "Matrix fragments for mma.m8n8k4 with .f16": a lane has a line along the depth, or across it.)
    """
    line, k = np.meshgrid(np.arange(8), np.arange(4), indexing="ij")
    half, across = np.divmod(line, 4)
    lane, element = (4 * half + k, across) if transposed else (4 * half + across, k)
    return (4 * lane + element).reshape(-1)


@lru_cache(maxsize=8)
def _make_quad_accumulator_layout(name: str) -> np.ndarray:
    """For each of eight lanes' eight slots its element [8, 8]."""
    lane, i = np.meshgrid(np.arange(8), np.arange(8), indexing="ij")
    if name == "f16":
        return (8 * lane + i).reshape(-1)
    row = 4 * (lane // 4) + (lane & 1) + (i & 2)
    return (8 * row + (i & 4) + (lane & 2) + (i & 1)).reshape(-1)


def decode_mma_m8n8k4(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction, layouts: tuple[str, ...]) -> None:
    """`mma.sync.aligned.m8n8k4.alayout.blayout.dtype.f16.f16.ctype`."""
    out, a, _, c = (TYPES[w] for w in inst.op if w in TYPES)
    transposed = [layouts[0] == "col", layouts[1] == "row"]
    b32 = TYPES["b32"]
    writers = [d.writer(o, b32) for o in get_vector_parts(inst.operands[0])]
    sources = [[d.reader(o, b32) for o in get_vector_parts(x)] for x in inst.operands[1:4]]
    line.group_size = 32

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        x, y, z = (_split_into_quad_pairs(gather_registers(m, lanes, s)) for s in sources)
        left, right = (
            convert_fragment_to_matrix(v, a, _make_quad_operand_layout(t), 8, 4)
            for v, t in zip((x, y), transposed, strict=True)
        )
        product = (left @ np.swapaxes(right, 1, 2)).reshape(-1, 64)
        addend = np.empty((len(z), 64), c.dtype)
        addend[:, _make_quad_accumulator_layout(c.name)] = np.ascontiguousarray(z).view(c.dtype).reshape(len(z), -1)
        scatter_registers(m, lanes, writers, _merge_quad_pairs(add_to_accumulator(product, addend, out, False), out))

    line.step = step


def _split_into_quad_pairs(registers: np.ndarray) -> np.ndarray:
    """Registers of warps [warps, 32, n] by quad pair."""
    return np.ascontiguousarray(registers[:, _QUAD_PAIR_LANES]).reshape(-1, 8, registers.shape[2])


def _merge_quad_pairs(elements: np.ndarray, t: PtxType) -> np.ndarray:
    """Matrices [quad pairs, 64] as registers of warps."""
    accumulators = (
        np.ascontiguousarray(elements[:, _make_quad_accumulator_layout(t.name)])
        .view(np.uint32)
        .reshape(-1, 32, 8 * t.bits // 32)
    )
    result = np.empty_like(accumulators)
    result[:, _QUAD_PAIR_LANES.reshape(-1)] = accumulators
    return result


# mma, and loads and stores of 8 by 8 matrices.


_LEFT = {"f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8", "f64", *NARROW_TYPES}


def _multiply(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x @ y


def _count_differing_bits(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x @ (1 - y) + (1 - x) @ y


_BIT_PRODUCTS = {"and": _multiply, "xor": _count_differing_bits}  # with `.popc`


def parse_mma_shape(word: str) -> tuple[int, int, int]:
    """The extents of a shape such as `m16n8k16`."""
    result = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", word)
    assert result is not None
    return int(result[1]), int(result[2]), int(result[3])


def register_type(t: PtxType) -> PtxType:
    """The type of the registers of fragments."""
    return TYPES["b64" if t.bits == 64 else "b32"]


def require_register_count(
    d: PtxDecoder, inst: PtxInstruction, operand: PtxOperand, count: int
) -> tuple[PtxOperand, ...]:
    """The registers of an operand, of which there must be `count`."""
    parts = get_vector_parts(operand)
    if len(parts) != count:
        raise d.unsupported(inst)
    return parts


@dataclass(frozen=True)
class _MmaForm:
    """The modifiers of an mma, which ptxas takes in any order: only layouts and types have one among themselves."""

    shape: tuple[int, int, int]
    layouts: tuple[str, ...]
    types: tuple[PtxType, ...]  # of D, A, B and C
    words: frozenset[str]


def _parse_mma_form(d: PtxDecoder, inst: PtxInstruction) -> _MmaForm:
    words = inst.op[1:]
    shapes = [w for w in words if re.fullmatch(r"m\d+n\d+k\d+", w)]
    types = [w for w in words if w in NARROW_TYPES or w in TYPES]
    layouts = tuple(w for w in words if w in ("row", "col"))
    rest = [w for w in words if w not in (*shapes, *types, *layouts)]
    if len(shapes) != 1 or len(types) != 4 or len(layouts) != 2 or len(set(rest)) < len(rest):
        raise d.unsupported(inst)
    found = tuple(NARROW_TYPES.get(w) or TYPES[w] for w in types)
    return _MmaForm(parse_mma_shape(shapes[0]), layouts, found, frozenset(rest))


def _require_mma_form(d: PtxDecoder, inst: PtxInstruction, form: _MmaForm) -> None:
    """Refuse what is no form of mma or mma.sp."""
    _, a, b, _ = form.types
    required = {"sync", "aligned"} | ({"popc"} if a.name == "b1" else set())
    known = required | {"satfinite", *_SPARSE} | ({"rn"} if a.name == "f64" else set())
    known |= set(_BIT_PRODUCTS) if a.name == "b1" else set()
    if not required <= form.words <= known or form.shape[1] != 8:
        raise d.unsupported(inst)
    if a.name not in _LEFT or b.name not in _LEFT or a.bits != b.bits:
        raise d.unsupported(inst)
    if form.layouts != ("row", "col") and (form.shape, a.name) != ((8, 8, 4), "f16"):
        raise d.unsupported(inst)


@decode_rule("mma", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    form = _parse_mma_form(d, inst)
    _require_mma_form(d, inst, form)
    (rows, _, depth), (out, a, b, c), words = form.shape, form.types, form.words
    if (rows, a.name) == (8, "f16"):
        decode_mma_m8n8k4(d, inst, line, form.layouts)
        return
    multiply = next((f for name, f in _BIT_PRODUCTS.items() if name in words), _multiply)
    expand = _decode_sparsity(d, inst, form) if words & _SPARSE else None
    held = depth // 2 if expand else depth  # along the depth of A
    elements_per_register = register_type(a).bits // a.bits
    register = [register_type(t) for t in (out, a, b, c)]
    sides = ((rows * 8, out), (rows * held, a), (depth * 8, b), (rows * 8, c))
    for operand, (count, t) in zip(inst.operands[: 4 if expand else None], sides, strict=True):
        require_register_count(d, inst, operand, count * t.bits // 32 // register_type(t).bits)
    writers = [d.writer(o, register[0]) for o in get_vector_parts(inst.operands[0])]
    sources = [
        [d.reader(o, r) for o in get_vector_parts(x)] for x, r in zip(inst.operands[1:4], register[1:], strict=True)
    ]
    order_a, order_b, order_c = (
        make_a_fragment_layout(rows, held, elements_per_register),
        make_b_fragment_layout(depth, elements_per_register),
        make_accumulator_layout(rows, 8),
    )
    line.group_size = 32

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        x, y, z = (gather_registers(m, lanes, s) for s in sources)
        left = convert_fragment_to_matrix(x, a, order_a, rows, held)
        left = expand(m, lanes, left) if expand else left
        product = multiply(left, convert_fragment_to_matrix(y, b, order_b, depth, 8))
        addend = np.ascontiguousarray(z).view(c.dtype).reshape(len(z), -1)
        total = add_to_accumulator(product.reshape(len(z), -1)[:, order_c], addend, out, "satfinite" in words)
        scatter_registers(m, lanes, writers, np.ascontiguousarray(total).view(register[0].dtype))

    line.step = step


# mma.sp: half of A's elements are zeros; metadata has the places of the others.


_SPARSE = frozenset({"sp", "sp::ordered_metadata"})
_DEEPEST_SPARSE_BITS = 512  # of a row of A; the other shape of a type has half of it


@lru_cache(maxsize=64)
def make_metadata_layout(chunks: int, bits: int, selector: int) -> tuple[np.ndarray, np.ndarray]:
    """For each chunk [16, chunks] of A, of `bits` an element: the lane whose metadata it has, and the bit of its four.

    A lane has four chunks of two rows (elements of 16 and 32 bits), or eight of one row. (PTX ISA, "Matrix fragments
    for multiply-accumulate operation with sparse matrix A"; an H200 gives the same.)
    """
    row, chunk = np.meshgrid(np.arange(16), np.arange(chunks), indexing="ij")
    lane, lower = 4 * (row % 8), row // 8
    if bits < 16:
        return lane + lower + 2 * (selector + chunk // 8), (4 * (chunk % 8)).astype(np.uint32)
    return lane + selector * (chunks // 4) + chunk // 4, (16 * lower + 4 * (chunk % 4)).astype(np.uint32)


def _decode_sparsity(
    d: PtxDecoder, inst: PtxInstruction, form: _MmaForm
) -> Callable[[PtxMachine, LaneSet, np.ndarray], np.ndarray]:
    """The function from the elements that A holds [warps, 16, depth / 2] to A [warps, 16, depth]."""
    (rows, _, depth), bits = form.shape, form.types[1].bits
    chunks = depth * bits // (64 if bits >= 16 else 32)
    is_eight_bit_float = bits == 8 and form.types[1].kind == "f"
    shortest = _DEEPEST_SPARSE_BITS if is_eight_bit_float else _DEEPEST_SPARSE_BITS // 2
    if rows != 16 or bits not in (4, 8, 16, 32) or depth * bits not in (shortest, _DEEPEST_SPARSE_BITS):
        raise d.unsupported(inst)
    _, _, _, _, metadata, selector = inst.operands
    if not isinstance(selector, ImmediateOperand) or selector.value not in range(16 // chunks):
        raise d.unsupported(inst)
    read = d.reader(metadata, TYPES["b32"])
    lane, shift = make_metadata_layout(chunks, bits, selector.value)
    span, is_ordered = depth // chunks, "sp::ordered_metadata" in form.words
    element = np.arange(span // 2)  # of those that a chunk holds

    def expand(m: PtxMachine, lanes: LaneSet, held: np.ndarray) -> np.ndarray:
        fours = gather_registers(m, lanes, [read])[:, lane, 0] >> shift & 15
        _check_metadata(lanes, fours, is_ordered)
        index = fours[..., None] >> (2 * (2 * element // len(element))).astype(np.uint32) & 3
        place = index * span // 4 + element % max(span // 4, 1)
        result = np.zeros((*fours.shape, span), held.dtype)
        np.put_along_axis(result, place.astype(np.int64), held.reshape(*fours.shape, -1), axis=-1)
        return result.reshape(len(held), rows, depth)

    return expand


def _check_metadata(lanes: LaneSet, fours: np.ndarray, is_ordered: bool) -> None:
    """Metadata names two places of a chunk; what equal ones mean is undefined."""
    first, second = fours & 3, fours >> 2
    wrong = first >= second if is_ordered else first == second
    if wrong.any():
        warp, row, chunk = np.argwhere(wrong)[0].tolist()
        message = f"sparsity metadata {int(fours[warp, row, chunk]):#06b} of chunk {chunk} in row {row}: expected two "
        message += "ascending indices" if is_ordered else "different indices"
        raise PtxFault(message, ExecutionError, int(lanes.flat[32 * warp]))


_MATRIX_COUNTS = {"x1": 1, "x2": 2, "x4": 4}


def _decode_matrix_count(d: PtxDecoder, inst: PtxInstruction) -> tuple[int, bool]:
    """The number of 8 by 8 matrices that an instruction moves, and whether they are transposed.

    The modifiers may be in any order, as in ptxas.
    """
    words = inst.op[1:-1]
    counts = [w for w in words if w in _MATRIX_COUNTS]
    rest = sorted(w for w in words if w not in (*_MATRIX_COUNTS, "trans", "shared", "shared::cta"))
    if rest != ["aligned", "m8n8", "sync"] or len(counts) != 1 or inst.op[-1] != "b16" or len(set(words)) < len(words):
        raise d.unsupported(inst)
    return _MATRIX_COUNTS[counts[0]], "trans" in words


@decode_rule("ldmatrix", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """Lanes 8i to 8i + 7 hold the row addresses of matrix i; each lane gets two neighbours of row lane / 4."""
    count, transposed = _decode_matrix_count(d, inst)
    writers = [d.writer(o, TYPES["b32"]) for o in require_register_count(d, inst, inst.operands[0], count)]
    where = decode_address(d, inst, inst.operands[1])
    line.group_size = 32

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        rows = _find_row_offsets(m, lanes, where, count, "read")
        cells = m.flat["shared"].views[2][rows[..., None] // 2 + np.arange(8)]
        if transposed:
            cells = np.swapaxes(cells, -1, -2)
        pairs = np.ascontiguousarray(cells).view(np.uint32).reshape(-1, count, 32)
        scatter_registers(m, lanes, writers, np.swapaxes(pairs, 1, 2))

    line.step = step


@decode_rule("stmatrix", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    count, transposed = _decode_matrix_count(d, inst)
    where = decode_address(d, inst, inst.operands[0])
    readers = [d.reader(o, TYPES["b32"]) for o in require_register_count(d, inst, inst.operands[1], count)]
    line.group_size = 32

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        pairs = np.ascontiguousarray(np.swapaxes(gather_registers(m, lanes, readers), 1, 2))
        cells = pairs.view(np.uint16).reshape(-1, count, 8, 8)
        if transposed:
            cells = np.swapaxes(cells, -1, -2)
        rows = _find_row_offsets(m, lanes, where, count, "write")
        m.flat["shared"].views[2][rows[..., None] // 2 + np.arange(8)] = cells

    line.step = step


def _find_row_offsets(m: PtxMachine, lanes: LaneSet, where: object, count: int, kind: str) -> np.ndarray:
    """The offsets of the rows [warps, matrices, 8]; the addresses of other lanes are ignored."""
    leading = lanes.select(lanes.thread % 32 < 8 * count) if count < 4 else lanes
    (access,) = resolve_accesses(m, leading, where, 16)  # type: ignore[arg-type]
    rows = access.lanes.compress(access.offset).reshape(-1, count, 8)
    if m.debug and kind == "read":
        # A matrix of which nothing is written lies beyond a block; what it gives goes into sums that nothing stores.
        written = m.shadow.bytes.known[rows[..., None] + np.arange(16)].any(axis=(2, 3))
        if not written.all():
            leading = access.lanes.select(access.lanes.expand(np.repeat(written, 8)))
            (access,) = resolve_accesses(m, leading, where, 16)  # type: ignore[arg-type]
    record_access(m, access, 16, kind)
    return rows


@decode_rule("movmatrix", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    if inst.op[1:] != ("sync", "aligned", "m8n8", "trans", "b16"):
        raise d.unsupported(inst)
    write, read = d.writer(inst.operands[0], TYPES["b32"]), d.reader(inst.operands[1], TYPES["b32"])
    line.group_size = 32

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        cells = gather_registers(m, lanes, [read]).view(np.uint16).reshape(-1, 8, 8)
        transposed = np.ascontiguousarray(np.swapaxes(cells, 1, 2)).view(np.uint32)
        scatter_registers(m, lanes, [write], transposed.reshape(-1, 32, 1))

    line.step = step


# wmma: its fragment layout is unspecified; here it is row-major.


def _get_fragment_extents(inst: PtxInstruction, fragment: str) -> tuple[int, int]:
    """The rows and columns of a fragment."""
    word = next(w for w in inst.op if w.startswith("m") and w[1:2].isdigit())
    m, n, k = parse_mma_shape(word)
    return {"a": (m, k), "b": (k, n), "c": (m, n), "d": (m, n)}[fragment]


@decode_rule("wmma", table=CONTROL_RULES)
def _(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    if any(w in inst.op for w in ("s4", "u4", "b1")):
        raise d.unsupported(inst)
    line.group_size = 32
    {"load": _decode_wmma_load, "store": _decode_wmma_store, "mma": _decode_wmma_mma}[inst.op[1]](d, inst, line)


def _decode_fragment_addressing(
    d: PtxDecoder, inst: PtxInstruction, fragment: str, t: PtxType, stride_at: int
) -> tuple[np.ndarray, np.ndarray, Reader]:
    """The row and column factors of each element's address, and the reader of the stride between lines."""
    require_known_modifiers(
        d, inst, fragment, inst.op[1], "sync", "aligned", "row", "col", *(w for w in inst.op if w[:1] == "m")
    )
    rows, columns = _get_fragment_extents(inst, fragment)
    r, c = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    lines, along = (r, c) if "row" in inst.op else (c, r)
    if len(inst.operands) > stride_at:
        return lines, along, d.reader(inst.operands[stride_at], TYPES["u32"])
    return lines, along, make_constant_reader(np.array([[columns if "row" in inst.op else rows]], np.uint32))


def _find_matrix_offsets(
    m: PtxMachine, lanes: LaneSet, where: AddressOperandReader, size: int, stride: Reader, kind: str
) -> tuple[str, np.ndarray, np.ndarray]:
    """The state space, and for each warp the start and stride of its matrix, in elements."""
    first = lanes.select(lanes.thread % 32 == 0)
    (access,) = resolve_accesses(m, first, where, size)
    record_access(m, access, size, kind)
    return access.space, first.compress(access.offset) // size, first.compress(stride(m, first)).astype(np.int64)


def _decode_wmma_load(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    """Slots beyond the matrix repeat it, to fill the number of registers."""
    t, fragment = TYPES[inst.op[-1]], inst.op[2]
    where = decode_address(d, inst, inst.operands[1])
    lines, along, stride = _decode_fragment_addressing(d, inst, fragment, t, 2)
    register = register_type(t)
    writers = [d.writer(o, register) for o in get_vector_parts(inst.operands[0])]
    elements_per_register = register.bits // t.bits

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        space, base, row_stride = _find_matrix_offsets(m, lanes, where, t.bits // 8, stride, "read")
        cells = m.flat[space].views[t.bits // 8]
        flat = cells[base[:, None] + (row_stride[:, None] * lines.reshape(-1) + along.reshape(-1))]
        slots = np.resize(np.arange(flat.shape[1]), 32 * len(writers) * elements_per_register).reshape(
            -1, 32, elements_per_register
        )
        values = np.ascontiguousarray(np.moveaxis(flat[:, slots], 1, 2)).view(register.dtype)
        scatter_registers(m, lanes, writers, values)

    line.step = step


def _order_fragment_elements(registers: np.ndarray, t: PtxType, size: int) -> np.ndarray:
    """The elements of fragments in memory order."""
    raw = np.ascontiguousarray(registers).view(get_storage_dtype(t)).reshape(len(registers), 32, registers.shape[2], -1)
    return np.swapaxes(raw, 1, 2).reshape(len(registers), -1)[:, :size]


def _decode_wmma_store(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    t = TYPES[inst.op[-1]]
    where = decode_address(d, inst, inst.operands[0])
    lines, along, stride = _decode_fragment_addressing(d, inst, "d", t, 2)
    readers = [d.reader(o, register_type(t)) for o in get_vector_parts(inst.operands[1])]

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        values = _order_fragment_elements(gather_registers(m, lanes, readers), t, lines.size)
        space, base, row_stride = _find_matrix_offsets(m, lanes, where, t.bits // 8, stride, "write")
        index = base[:, None] + (row_stride[:, None] * lines.reshape(-1) + along.reshape(-1))
        m.flat[space].views[t.bits // 8][index] = values

    line.step = step


def _decode_wmma_mma(d: PtxDecoder, inst: PtxInstruction, line: DecodedInstruction) -> None:
    types = [TYPES[w] for w in inst.op[6:] if w in TYPES]
    out, a, b, c = types if len(types) == 4 else (types[0], TYPES["f16"], TYPES["f16"], types[-1])
    shapes = [_get_fragment_extents(inst, w) for w in "abc"]
    writers = [d.writer(o, register_type(out)) for o in get_vector_parts(inst.operands[0])]
    sources = [
        [d.reader(o, register_type(t)) for o in get_vector_parts(x)]
        for x, t in zip(inst.operands[1:4], (a, b, c), strict=True)
    ]

    def step(m: PtxMachine, lanes: LaneSet) -> None:
        x, y, z = (
            _order_fragment_elements(gather_registers(m, lanes, s), t, rows * columns)
            for s, t, (rows, columns) in zip(sources, (a, b, c), shapes, strict=True)
        )
        product = widen_elements(x, a).reshape(-1, *shapes[0]) @ widen_elements(y, b).reshape(-1, *shapes[1])
        total = add_to_accumulator(product.reshape(len(x), -1), z.view(c.dtype), out, "satfinite" in inst.op)
        elements_per_register = register_type(out).bits // out.bits
        slots = np.swapaxes(total.reshape(len(x), -1, 32, elements_per_register), 1, 2)
        scatter_registers(m, lanes, writers, np.ascontiguousarray(slots).view(register_type(out).dtype))

    line.step = step
