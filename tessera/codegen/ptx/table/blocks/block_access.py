"""Block accesses: addresses of a block's elements in memory, its vectorised, predicated loads and stores, and the
packed form of elements in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tessera.codegen.ptx.context import (
    VECTOR_BYTES,
    EmissionContext,
    PtxMemRef,
    Registers,
    VectorAccess,
    find_vector_length,
)
from tessera.codegen.ptx.layout import DistributedLayout, Sizes, and_predicates
from tessera.codegen.ptx.table.blocks.fp8_conversion import NAMES, PAIR_ARCHS, decode_pairs, encode_pairs
from tessera.codegen.ptx.table.scalars.arithmetic import materialise_operand, select_register
from tessera.codegen.ptx.table.scalars.math_functions import emit_decomposition
from tessera.codegen.ptx.text.builder import (
    SMALL_FLOATS,
    PtxBuilder,
    element_bytes,
    is_immediate,
    register_class,
)
from tessera.core.symbolic_dim import Dim, Size, find_size_divisor
from tessera.core.types import DType, bf16, bool_, f16, int4, int8, int16, uint8, uint16
from tessera.ir.analysis import find_divisor
from tessera.ir.core import Value
from tessera.lower.scalar_functions.small_floats import (
    build_decoder,
    build_exact_encoder,
    decode_shift,
)

MAX_OFFSET = 1 << 31  # the constant offset of an address operand has 32 bits


def plan_block_accesses(
    ctx: EmissionContext,
    m: PtxMemRef,
    starts: Sequence[Value],
    layout: DistributedLayout,
    clip: bool,
    masks: Sequence[str],
    once: bool,
    vector: int = 1,
) -> list[VectorAccess]:
    """The accesses that cover a block beginning at `starts`, which is at a multiple of `vector` elements; with `once` a
    single thread accesses each element."""
    block = BlockAddress(ctx, m, starts, layout, vector)
    guards = [_make_guard(ctx, block, i, clip, masks, once) for i in range(layout.count)]
    length = block.find_vector_length()
    accesses = []
    for first in range(0, layout.count, length):
        address, offset = block.locate(layout.offsets[first])
        accesses.append(VectorAccess(first, length, address, offset, tuple(guards[first : first + length])))
    return accesses


def _make_guard(ctx: EmissionContext, block: BlockAddress, i: int, clip: bool, masks: Sequence[str], once: bool) -> str:
    """The predicate of register `i`: inside the block and the memory, unmasked, and in the owning thread."""
    layout = block.layout
    found = ctx.team.bounds_predicates(layout, layout.offsets[i])
    if clip:
        found += block.clip_predicates(layout.offsets[i])
    owner = [ctx.team.owner_predicate(layout)] if once else []
    return block.and_cached((*owner, *found, *(masks[i : i + 1] if masks else ())))


class BlockAddress:
    """Address and bounds predicates of a block in memory; each is computed once."""

    def __init__(
        self, ctx: EmissionContext, m: PtxMemRef, starts: Sequence[Value], layout: DistributedLayout, vector: int = 1
    ) -> None:
        self.ctx, self.m, self.starts, self.layout, self.vector = ctx, m, starts, layout, vector
        self._base = ""
        self._far_addresses: dict[Size, str] = {}
        self._clips: dict[tuple[int, int], str] = {}
        self._conjunctions: dict[tuple[str, ...], str] = {}
        self._unproven_axes = ctx.analyses.ranges.find_unproven_axes(starts, layout.shape, m.shape)

    def base(self) -> str:
        """The address of the thread's first element."""
        if not self._base:
            text, team = self.ctx.text, self.ctx.team
            total = self.m.base
            for v, stride in zip(self.starts, self.m.strides, strict=True):
                start = self.ctx.scalar_operand(v)
                if start != "0":
                    start = _widen_index(self.ctx, v, start)
                    total = text.let("mad.lo.s64", "b64", start, self.ctx.sizes.find(stride), total)
            for axis, stride in enumerate(self.m.strides):
                offset = team.thread_offset(self.layout, axis)
                if offset != "0":
                    scaled = self._scale_offset(offset, stride)
                    total = text.let("add.s64", "b64", total, scaled)
            self._base = total
        return self._base

    def _scale_offset(self, offset: str, stride: Size) -> str:
        team, key = self.ctx.team, ("offset", offset, stride)
        if not isinstance(stride, Dim):
            return team.hoist(key, "mul.wide.u32", "b64", offset, stride)
        step = self.ctx.sizes.find(stride)
        return team.hoist(key, "mul.lo.u64", "b64", team.hoist(("wide", offset), "cvt.u64.u32", "b64", offset), step)

    def locate(self, offset: Sizes) -> tuple[str, int]:
        """A register and a constant whose sum is the address of an element."""
        distance = sum(n * stride for n, stride in zip(offset, self.m.strides, strict=True))
        if not isinstance(distance, Dim) and distance < MAX_OFFSET:
            return self.base(), distance
        if distance not in self._far_addresses:
            step = self.ctx.sizes.find(distance)
            self._far_addresses[distance] = self.ctx.text.let("add.s64", "b64", self.base(), step)
        return self._far_addresses[distance], 0

    def find_vector_length(self) -> int:
        """The leading registers that hold neighbours in memory which one access can move."""
        count, rank = 0, len(self.m.shape)
        for i, bit in enumerate(self.layout.registers):
            if bit != (rank - 1, i):
                break
            count += 1
        most = min(1 << count, VECTOR_BYTES // element_bytes(self.m.dtype))
        return find_vector_length(
            self.ctx.analyses.producers, self.m, self.starts, self.layout.shape, most, self.vector
        )

    def clip_predicates(self, offset: Sizes) -> list[str]:
        """The predicates that an element is inside the memory, along the axes where that is not proven."""
        return [self._clip(axis, offset[axis]) for axis in self._unproven_axes]

    def _clip(self, axis: int, offset: int) -> str:
        size = self.m.shape[axis]
        divisor = find_size_divisor(size, find_divisor(self.ctx.analyses.producers, self.starts[axis]))
        offset -= offset % (divisor & -divisor)  # neighbours share a predicate, as in `ThreadTeam.axis_predicate`
        if (axis, offset) not in self._clips:
            ctx, text = self.ctx, self.ctx.text
            index = _widen_index(ctx, self.starts[axis], ctx.scalar_operand(self.starts[axis]))
            thread = ctx.team.thread_offset(self.layout, axis)
            if thread != "0":
                index = text.let(
                    "add.s64", "b64", ctx.team.hoist(("wide", thread), "cvt.u64.u32", "b64", thread), index
                )
            if offset:
                index = text.let("add.s64", "b64", index, offset)
            if is_immediate(index):
                index = text.let("mov.b64", "b64", index)
            # Compared as unsigned numbers, negative indices are out of bounds too.
            self._clips[axis, offset] = text.let("setp.lt.u64", "pred", index, ctx.sizes.find(size))
        return self._clips[axis, offset]

    def and_cached(self, predicates: tuple[str, ...]) -> str:
        """The conjunction of predicates."""
        found = tuple(dict.fromkeys(p for p in predicates if p))
        if found not in self._conjunctions:
            self._conjunctions[found] = and_predicates(self.ctx.text, *found)
        return self._conjunctions[found]


def _widen_index(ctx: EmissionContext, v: Value, register: str) -> str:
    """An index as 64 bits."""
    if v.type.dtype.bits == 64 or is_immediate(register):
        return register
    return ctx.text.let(f"cvt.s64.{'u32' if v.type.dtype.kind == 'uint' else 's32'}", "b64", register)


def load_block(
    ctx: EmissionContext, m: PtxMemRef, accesses: Sequence[VectorAccess], others: Sequence[str] = ()
) -> Registers:
    """Load the elements of a block, one for each register; where a guard fails, the one of `others`, or 0."""
    found: list[str] = []
    for access in accesses:
        elements = load_elements(ctx.text, m.space, m.dtype, access)
        guarded = zip(elements, access.guards, others[access.first : access.first + access.count], strict=False)
        found += [_select_masked(ctx, m, x, g, o) for x, g, o in guarded] if others else elements
    return tuple(found)


def _select_masked(ctx: EmissionContext, m: PtxMemRef, x: str, guard: str, other: str) -> str:
    return select_register(ctx.text, m.dtype, guard, x, other) if guard else x


def store_block(ctx: EmissionContext, m: PtxMemRef, accesses: Sequence[VectorAccess], elements: Sequence[str]) -> None:
    """Store the elements of a block whose guards hold."""
    for access in accesses:
        values = elements[access.first : access.first + access.count]
        store_elements(ctx.text, m.space, m.dtype, access, values)


# Packing: elements in memory's form, 8 to 64 bits each, loaded and stored in vectors of up to 16 bytes.


WORD_TYPES = {"f32": "f32", "f64": "f64", "b32": "b32", "b64": "b64"}


def load_elements(text: PtxBuilder, space: str, dtype: DType, run: VectorAccess) -> list[str]:
    """A run of elements; those whose guard fails are 0."""
    even = len(set(run.guards)) == 1
    if even or run.count == 1:
        return _load_vector(text, space, dtype, run.operand, run.count, run.guards[0])
    every = _and_guards(text, run.guards)
    elements = _load_vector(text, space, dtype, run.operand, run.count, every)
    return [_load_masked_element(text, space, dtype, run, i, x, every) for i, x in enumerate(elements)]


def _load_masked_element(
    text: PtxBuilder, space: str, dtype: DType, run: VectorAccess, i: int, x: str, every: str
) -> str:
    """An element of a run that could not be loaded whole."""
    if not run.guards[i]:
        alone = text.let("not.pred", "pred", every)
    else:
        none = text.let("not.pred", "pred", every)
        alone = text.let("and.pred", "pred", run.guards[i], none)
    (single,) = _load_vector(text, space, dtype, _element_operand(run, i, dtype), 1, alone)
    return select_register(text, dtype, every, x, single)


def _and_guards(text: PtxBuilder, guards: Sequence[str]) -> str:
    total = ""
    for each in dict.fromkeys(g for g in guards if g):
        total = text.let("and.pred", "pred", total, each) if total else each
    return total


def _element_operand(run: VectorAccess, i: int, dtype: DType) -> str:
    offset = run.offset + i * element_bytes(dtype)
    return f"[{run.address}+{offset}]" if offset else f"[{run.address}]"


def _load_vector(text: PtxBuilder, space: str, dtype: DType, place: str, count: int, guard: str) -> list[str]:
    kind, words = _word_form(dtype, count)
    registers = [text.new(_word_class(kind)) for _ in range(words)]
    if guard:
        for each in registers:
            text.do(f"mov.{_word_class(kind)}", each, zero_literal(kind))
    vector = f".v{words}" if words > 1 else ""
    shown = f"{{{', '.join(registers)}}}" if words > 1 else registers[0]
    text.do(f"ld.{space}{vector}.{kind}", shown, place, guard=guard)
    if _converts_pairs(text, dtype):
        return decode_pairs(text, dtype, registers, count)
    return [_decode_element(text, dtype, registers, i) for i in range(count)]


def _converts_pairs(text: PtxBuilder, dtype: DType) -> bool:
    """Whether the architecture converts pairs of a type."""
    return dtype in NAMES and text.arch in PAIR_ARCHS


def _word_form(dtype: DType, count: int) -> tuple[str, int]:
    """The type of the words that hold `count` elements, and how many words."""
    total = count * element_bytes(dtype)
    kind = register_class(dtype)
    if element_bytes(dtype) >= 4:
        return WORD_TYPES[kind], count
    return {1: ("u8", 1), 2: ("u16", 1)}.get(total, ("b32", total // 4))


def _word_class(kind: str) -> str:
    return {"u8": "b32", "u16": "b32"}.get(kind, kind)


def zero_literal(kind: str) -> str:
    """The immediate 0 of a class of registers."""
    return {"f32": "0f00000000", "f64": "0d0000000000000000"}.get(kind, "0")


def _decode_element(text: PtxBuilder, dtype: DType, registers: Sequence[str], i: int) -> str:
    """Element `i` of what was loaded."""
    if element_bytes(dtype) >= 4:
        return registers[i]
    each = 4 // element_bytes(dtype)
    register, part = registers[i // each], i % each
    found = DECODERS[dtype](text, register, part)
    if each == 2:
        text.halves[found] = (register, part)
    return found


def _decode_bf16(text: PtxBuilder, r: str, part: int) -> str:
    bits = text.let("and.b32", "b32", r, "0xFFFF0000") if part else text.let("shl.b32", "b32", r, 16)
    return text.let("mov.b32", "f32", bits)


def _decode_f16(text: PtxBuilder, r: str, part: int) -> str:
    low, high = text.new("b16"), text.new("b16")
    text.do("mov.b32", f"{{{low}, {high}}}", r)
    return text.let("cvt.f32.f16", "f32", high if part else low)


def _make_field_decoder(sign: str, bits: int):  # type: ignore[no-untyped-def]
    return lambda text, r, part: text.let(f"bfe.{sign}32", "b32", r, part * bits, bits)


def _decode_bool(text: PtxBuilder, r: str, part: int) -> str:
    return text.let("setp.ne.u32", "pred", text.let("bfe.u32", "b32", r, part * 8, 8), 0)


def _decode_small_float(dtype: DType, text: PtxBuilder, r: str, part: int) -> str:
    """A byte of a word as an f32, by the codec's decoder, which reads the sign at bit 31."""
    shift = decode_shift(dtype) - 8 * part
    word = text.let("shl.b32", "b32", r, shift) if shift else r
    return emit_decomposition(text, build_decoder(dtype), word)


DECODERS = {
    bf16: _decode_bf16,
    f16: _decode_f16,
    int16: _make_field_decoder("s", 16),
    int8: _make_field_decoder("s", 8),
    uint8: _make_field_decoder("u", 8),
    uint16: _make_field_decoder("u", 16),
    bool_: _decode_bool,
    int4: lambda text, r, part: text.let("bfe.s32", "b32", r, part * 8, 4),
    **{d: partial(_decode_small_float, d) for d in SMALL_FLOATS},
}


def store_elements(text: PtxBuilder, space: str, dtype: DType, run: VectorAccess, elements: Sequence[str]) -> None:
    """Write a run of elements, those whose guards hold."""
    if len(set(run.guards)) == 1 or run.count == 1:
        _store_vector(text, space, dtype, run.operand, elements, run.guards[0])
        return
    every = _and_guards(text, run.guards)
    _store_vector(text, space, dtype, run.operand, elements, every)
    none = text.let("not.pred", "pred", every)
    for i, (x, guard) in enumerate(zip(elements, run.guards, strict=True)):
        alone = text.let("and.pred", "pred", guard, none) if guard else none
        _store_vector(text, space, dtype, _element_operand(run, i, dtype), [x], alone)


def _store_vector(text: PtxBuilder, space: str, dtype: DType, place: str, elements: Sequence[str], guard: str) -> None:
    kind, words = _word_form(dtype, len(elements))
    registers = list(elements) if element_bytes(dtype) >= 4 else encode_elements(text, dtype, elements)
    registers = [materialise_operand(text, _word_class(kind), r) for r in registers]
    vector = f".v{words}" if words > 1 else ""
    shown = f"{{{', '.join(registers)}}}" if words > 1 else registers[0]
    text.do(f"st.{space}{vector}.{kind}", place, shown, guard=guard)


def encode_elements(text: PtxBuilder, dtype: DType, elements: Sequence[str]) -> list[str]:
    """Narrow elements as words, the first in the low bits."""
    if dtype in (bf16, f16):
        return [pack_halves(text, dtype, *elements[i : i + 2]) for i in range(0, len(elements), 2)]
    if _converts_pairs(text, dtype):
        return encode_pairs(text, dtype, elements)
    plain = list(elements)
    if dtype == bool_:
        plain = [text.let("selp.b32", "b32", 1, 0, x) for x in elements]
    if dtype in SMALL_FLOATS:
        plain = [emit_decomposition(text, build_exact_encoder(dtype), x) for x in elements]
    return _pack_integers(text, plain, 4 // element_bytes(dtype))


def _pack_integers(text: PtxBuilder, parts: Sequence[str], each: int) -> list[str]:
    """Integers of 8 or 16 bits put together."""
    while len(parts) > 1 and each > 1:
        mode = "0x5410" if each == 2 else "0x0040"
        pairs = [
            (materialise_operand(text, "b32", a), materialise_operand(text, "b32", b))
            for a, b in zip(parts[::2], parts[1::2], strict=True)
        ]
        parts = [text.let("prmt.b32", "b32", a, b, mode) for a, b in pairs]
        each //= 2
    return list(parts)


def pack_halves(text: PtxBuilder, dtype: DType, low: str, high: str = "") -> str:
    """One or two narrow floats; two that were just rounded are rounded and packed anew, in one instruction."""
    whole = text.halves.get(low)
    if whole is not None and whole[1] == 0 and text.halves.get(high) == (whole[0], 1):
        return whole[0]
    first, second = text.rounding_sources.get(low), text.rounding_sources.get(high)
    if first is None or second is None or {first[0], second[0]} != {dtype}:
        return ENCODERS[dtype](text, low, high)
    return text.let(f"cvt.rn.{dtype.name}x2.f32", "b32", second[1], first[1])


def encode_bf16(text: PtxBuilder, low: str, high: str = "") -> str:
    """One or two f32 that hold values of bf16 as its bits: exact, they are the upper halves."""
    first = text.let("mov.b32", "b32", low)
    if not high:
        return text.let("shr.u32", "b32", first, 16)
    return text.let("prmt.b32", "b32", first, text.let("mov.b32", "b32", high), "0x7632")


def encode_f16(text: PtxBuilder, low: str, high: str = "") -> str:
    """One or two f32 that hold values of f16 as its bits."""
    first = text.let("cvt.rn.f16.f32", "b16", low)
    second = text.let("cvt.rn.f16.f32", "b16", high) if high else ""
    if not high:
        return text.let("cvt.u32.u16", "b32", first)
    return text.let("mov.b32", "b32", f"{{{first}, {second}}}")


ENCODERS = {bf16: encode_bf16, f16: encode_f16}
