"""Texture and surface instructions: tex, tld4, txq, suld, sust, sured, suq and istypep, in both texture modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, OutOfBoundsError
from tessera.interp.target.ptx.isa.atomics import reduce_cells
from tessera.interp.target.ptx.isa.decoder import PtxDecoder, decode_rule
from tessera.interp.target.ptx.isa.operands import (
    PtxVariableAddress,
    Reader,
    get_vector_parts,
    make_constant_reader,
    split_pair,
)
from tessera.interp.target.ptx.isa.texture import (
    ADDRESS_MODES,
    FILTERS,
    SamplerObject,
    SurfaceObject,
    TextureObject,
    find_footprint,
    find_object_index,
    pad_channels,
    read_texels,
    sample,
    view_texels,
)
from tessera.interp.target.ptx.machine.lane_set import LaneSet
from tessera.interp.target.ptx.machine.memory import GENERIC_WINDOWS, PtxFault
from tessera.interp.target.ptx.machine.simt import LaneStep, PtxMachine
from tessera.interp.target.ptx.text.syntax import (
    TYPES,
    AddressOperand,
    NameOperand,
    PtxInstruction,
    PtxOperand,
    PtxType,
    VectorOperand,
)

# Geometry: the dimensions of a texel, and whether a layer comes before them.
_GEOMETRIES = {"1d": (1, False), "2d": (2, False), "3d": (3, False), "a1d": (1, True), "a2d": (2, True)}
# Operands: handles, coordinates and the objects that lanes address.


@dataclass(frozen=True)
class _TexelAddress:
    """The operand `[texture, {x, y}]` or `[texture, sampler, {x, y}]`: readers of handles, layer and coordinates."""

    read: Reader
    sampler: Reader | None
    layer: Reader | None
    coordinates: list[Reader]


def _decode_handle(d: PtxDecoder, name: str, location: Any) -> Reader:
    """The reader of a handle: of a register, or of a variable or parameter that holds it."""
    found = d.resolve(name, location)
    if not isinstance(found, PtxVariableAddress):
        return d.reader(NameOperand(name), TYPES["u64"])
    base = GENERIC_WINDOWS["global"] if found.space == "param" else 0
    return make_constant_reader(np.array([[base + found.address]], np.uint64))


def _decode_texel_address(d: PtxDecoder, inst: PtxInstruction, operand: PtxOperand, type: PtxType) -> _TexelAddress:
    geometry = next((w for w in inst.op if w in _GEOMETRIES), None)
    if geometry is None or not isinstance(operand, AddressOperand) or operand.coordinates is None:
        raise d.unsupported(inst)
    dims, layered = _GEOMETRIES[geometry]
    parts = operand.coordinates
    if operand.base is None or len(parts) < dims + layered:
        raise d.unsupported(inst)
    return _TexelAddress(
        _decode_handle(d, operand.base, inst.location),
        _decode_handle(d, operand.sampler, inst.location) if operand.sampler else None,
        d.reader(parts[0], TYPES["u32"]) if layered else None,
        [d.reader(p, type) for p in parts[layered : layered + dims]],
    )


def _find_object(m: PtxMachine, handle: int, kinds: Any, lane: int) -> Any:
    """The object of a handle, or of the variable at a generic address.

    Raises:
        PtxFault: there is none, or it is of another kind.
    """
    index = find_object_index(handle)
    if index is None:
        offset = handle - GENERIC_WINDOWS["global"]
        if 0 <= offset <= m.arena.top - 8 and offset % 8 == 0:
            index = find_object_index(int(m.arena.flat.views[8][offset // 8]))
    if index is None or index >= len(m.arena.objects):
        raise PtxFault(f"{handle:#x} is not the handle of a texture, sampler or surface", ArgumentError, lane)
    found, start = m.arena.objects[index]
    if not isinstance(found, kinds):
        wanted = kinds.__name__ if isinstance(kinds, type) else "object"
        raise PtxFault(f"a {found.__class__.__name__} where a {wanted} is read", ArgumentError, lane)
    return found, start


def _group_lanes(m: PtxMachine, lanes: LaneSet, read: Reader, kinds: Any) -> Iterator[tuple[LaneSet, Any, Any]]:
    """The lanes by object: with the object and its texels in memory."""
    handles = np.broadcast_to(read(m, lanes), lanes.shape)
    for handle in np.unique(lanes.compress(handles)).tolist():
        subset = lanes.select(handles == handle)
        found, start = _find_object(m, handle, kinds, int(subset.flat[0]))
        texels = None if isinstance(found, SamplerObject) else view_texels(found, m.arena.flat.raw[start:])
        yield subset, found, texels


def _check_geometry(found: TextureObject | SurfaceObject, where: _TexelAddress, lanes: LaneSet) -> None:
    dims = len(where.coordinates)
    if len(found.extent) != dims or found.layered != (where.layer is not None):
        had = f"{len(found.extent)} dimensions{' and layers' if found.layered else ''}"
        raise PtxFault(f"the object has {had}, the instruction {dims}", ArgumentError, int(lanes.flat[0]))


def _read_coordinates(m: PtxMachine, lanes: LaneSet, where: _TexelAddress) -> tuple[list[np.ndarray], np.ndarray]:
    """The coordinates and the layer of each lane."""
    axes = [_compress(m, lanes, r) for r in where.coordinates]
    layer = _compress(m, lanes, where.layer) if where.layer else np.zeros(lanes.count, np.int64)
    return axes, layer.astype(np.int64)


def _compress(m: PtxMachine, lanes: LaneSet, read: Reader) -> np.ndarray:
    return lanes.compress(np.broadcast_to(read(m, lanes), lanes.shape))


def _choose_sampler(m: PtxMachine, lanes: LaneSet, where: _TexelAddress, texture: TextureObject) -> SamplerObject:
    """The sampler operand's object (one for all lanes), or the texture's own."""
    if where.sampler is None:
        return texture.sampler
    handles = np.unique(_compress(m, lanes, where.sampler)).tolist()
    if len(handles) > 1:
        raise PtxFault("the lanes of a fetch read through different samplers", ArgumentError, int(lanes.flat[0]))
    return _find_object(m, handles[0], SamplerObject, int(lanes.flat[0]))[0]


# Textures.


def _make_texel_writer(d: PtxDecoder, inst: PtxInstruction, out: PtxType) -> Callable[..., None]:
    """The writer of four channels; two registers of packed halves take two each."""
    target, resident = split_pair(inst.operands[0])
    parts = get_vector_parts(target)
    if len(parts) * out.parts != 4:
        raise d.unsupported(inst)
    writers = [d.writer(p, out) for p in parts]
    flag = None if resident == NameOperand("_") else d.writer(resident, TYPES["pred"])

    def write(m: PtxMachine, lanes: LaneSet, values: np.ndarray) -> None:
        values = values.astype(out.dtype)
        for k, writer in enumerate(writers):
            columns = values[:, k * out.parts : (k + 1) * out.parts]
            whole = np.stack([lanes.expand(c) for c in columns.T], axis=-1)
            writer(m, lanes, whole if out.parts > 1 else whole[..., 0])
        if flag is not None:
            flag(m, lanes, np.array([[True]]))

    return write


def _check_read_type(texture: TextureObject, out: PtxType, lanes: LaneSet) -> None:
    if texture.reads_floats != (out.kind == "f"):
        kind = "floats" if texture.reads_floats else "integers"
        raise PtxFault(f"a texture of {kind} read as .{out.name}", ArgumentError, int(lanes.flat[0]))


def _split_fetch_operands(d: PtxDecoder, inst: PtxInstruction, first: int) -> list[Reader]:
    """The readers of the offsets that follow the address and the level; depth comparison is not supported."""
    rest = inst.operands[first:]
    if not rest:
        return []
    if len(rest) > 1 or not isinstance(rest[0], VectorOperand):
        raise d.unsupported(inst)
    return [d.reader(p, TYPES["s32"]) for p in rest[0].parts]


@decode_rule("tex")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """A texture has one level, which every level of detail reads."""
    words, out, type = set(inst.op[1:-2]), TYPES[inst.op[-2]], TYPES[inst.op[-1]]
    if not words <= {"base", "level", "grad", "v4", "v2", *_GEOMETRIES} or type.name not in ("f32", "s32"):
        raise d.unsupported(inst)
    where = _decode_texel_address(d, inst, inst.operands[1], type)
    offsets = _split_fetch_operands(d, inst, 2 + ("level" in words) + 2 * ("grad" in words))
    write = _make_texel_writer(d, inst, out)

    def fetch(m: PtxMachine, lanes: LaneSet) -> None:
        for subset, texture, texels in _group_lanes(m, lanes, where.read, TextureObject):
            _check_geometry(texture, where, subset)
            _check_read_type(texture, out, subset)
            axes, layer = _read_coordinates(m, subset, where)
            sampler = _choose_sampler(m, subset, where, texture)
            moves = [_compress(m, subset, r) for r in offsets]
            if type.kind == "f":
                values = sample(texture, texels, axes, layer, sampler, moves)
            else:
                at = [a.astype(np.int64) for a in axes]
                if moves:
                    at = [a + o for a, o in zip(at, moves, strict=False)]
                values = pad_channels(read_texels(texture, texels, at, layer, None))
            write(m, subset, values)

    return fetch


_GATHER_ORDER = ((0, 1), (1, 1), (1, 0), (0, 0))  # counterclockwise from the lower left, y downwards


@decode_rule("tld4")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """One channel of the four texels that a linear filter would weigh."""
    out, type = TYPES[inst.op[-2]], TYPES[inst.op[-1]]
    if inst.op[1] not in "rgba" or not set(inst.op[2:-2]) <= {"2d", "a2d", "v4", "v2"} or type.name != "f32":
        raise d.unsupported(inst)
    where, channel = _decode_texel_address(d, inst, inst.operands[1], type), "rgba".index(inst.op[1])
    offsets, write = _split_fetch_operands(d, inst, 2), _make_texel_writer(d, inst, out)

    def gather(m: PtxMachine, lanes: LaneSet) -> None:
        for subset, texture, texels in _group_lanes(m, lanes, where.read, TextureObject):
            _check_geometry(texture, where, subset)
            _check_read_type(texture, out, subset)
            axes, layer = _read_coordinates(m, subset, where)
            sampler = _choose_sampler(m, subset, where, texture)
            (x, y), _ = find_footprint(texture, axes, sampler, linear=True)
            moves = [*(_compress(m, subset, r) for r in offsets), 0, 0][:2]
            corners = ([x + dx + moves[0], y + dy + moves[1]] for dx, dy in _GATHER_ORDER)
            read = [pad_channels(read_texels(texture, texels, at, layer, sampler))[:, channel] for at in corners]
            write(m, subset, np.stack(read, axis=1))

    return gather


# Queries: a number for each property of an object (PTX ISA, "Opaque Types").

_DATA_TYPES = {name: 0x10D7 + i for i, name in enumerate(("i1", "i2", "i4", "u1", "u2", "u4", "f2", "f4"))}
_NORMALIZED_TYPES = {"i1": 0x10D0, "i2": 0x10D1, "u1": 0x10D2, "u2": 0x10D3}
_CHANNEL_ORDERS = {1: 0x10B0, 2: 0x10B2, 4: 0x10B5}


def _find_data_type(o: Any) -> int:
    code = o.array.dtype.str[1:]
    return _NORMALIZED_TYPES[code] if getattr(o, "normalized_read", False) else _DATA_TYPES[code]


def _find_sampler(o: Any) -> SamplerObject:
    return o if isinstance(o, SamplerObject) else o.sampler


_QUERIES: dict[str, Callable[[Any], int]] = {
    "width": lambda o: o.extent[0],
    "height": lambda o: (*o.extent, 0)[1],
    "depth": lambda o: (*o.extent, 0, 0)[2],
    "array_size": lambda o: o.array.shape[0] if o.layered else 0,
    "num_mipmap_levels": lambda o: 1,
    "num_samples": lambda o: 1,
    "channel_data_type": _find_data_type,
    "channel_order": lambda o: _CHANNEL_ORDERS[o.channels],
    "normalized_coords": lambda o: _find_sampler(o).normalized,
    "force_unnormalized_coords": lambda o: 0,
    "filter_mode": lambda o: FILTERS.index(_find_sampler(o).filter),
    "addr_mode_0": lambda o: ADDRESS_MODES.index(_find_sampler(o).get_mode(0)),
    "addr_mode_1": lambda o: ADDRESS_MODES.index(_find_sampler(o).get_mode(1)),
    "addr_mode_2": lambda o: ADDRESS_MODES.index(_find_sampler(o).get_mode(2)),
    "memory_layout": lambda o: 1,
}
_SAMPLER_QUERIES = {
    "normalized_coords", "force_unnormalized_coords", "filter_mode", "addr_mode_0", "addr_mode_1", "addr_mode_2",
}  # fmt: skip


@decode_rule("txq", "suq")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    name = next((w for w in inst.op[1:] if w in _QUERIES), None)
    operand = inst.operands[1]
    surface = inst.op[0] == "suq"
    if name is None or not isinstance(operand, AddressOperand) or (surface and name in _SAMPLER_QUERIES):
        raise d.unsupported(inst)
    read, write = _decode_handle(d, str(operand.base), inst.location), d.writer(inst.operands[0], TYPES["b32"])
    kinds: Any = SurfaceObject if surface else TextureObject
    if name in _SAMPLER_QUERIES:
        kinds = (TextureObject, SamplerObject)

    def query(m: PtxMachine, lanes: LaneSet) -> None:
        for subset, found, _ in _group_lanes(m, lanes, read, kinds):
            write(m, subset, np.array([[_QUERIES[name](found)]], np.uint32))

    return query


_REFERENCES = {"texref": TextureObject, "samplerref": SamplerObject, "surfref": SurfaceObject}


@decode_rule("istypep")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    kind = _REFERENCES[inst.op[1]]
    operand = inst.operands[1]
    if not isinstance(operand, NameOperand):
        raise d.unsupported(inst)
    read, write = _decode_handle(d, operand.text, inst.location), d.writer(inst.operands[0], TYPES["pred"])

    def test(m: PtxMachine, lanes: LaneSet) -> None:
        for subset, found, _ in _group_lanes(m, lanes, read, object):
            write(m, subset, np.array([[isinstance(found, kind)]]))

    return test


# Surfaces.

_BOUNDARY = {"trap", "clamp", "zero"}
_SURFACE_REDUCTIONS = {"add", "min", "max", "and", "or"}


def _locate_texels(
    m: PtxMachine, lanes: LaneSet, where: _TexelAddress, surface: SurfaceObject, size: int, mode: str, bytewise: bool
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The byte of x (of the first channel), y, z and layer of each lane, and which are inside.

    Raises:
        PtxFault: x is not a multiple of the size, or with `trap` a place is outside.
    """
    axes, layer = _read_coordinates(m, lanes, where)
    axes = [a.astype(np.int64) for a in axes]
    texel = surface.channels * surface.array.itemsize
    axes[0] = axes[0] if bytewise else axes[0] * texel
    limits = [surface.extent[0] * texel - size, *(n - 1 for n in surface.extent[1:])]
    if (wrong := axes[0] % size != 0).any():
        message = f"x is byte {int(axes[0][wrong][0])}, not a multiple of {size}"
        raise PtxFault(message, OutOfBoundsError, int(lanes.flat[np.argmax(wrong)]))
    inside = (layer >= 0) & (layer < (surface.array.shape[0] if surface.layered else 1))
    for a, most in zip(axes, limits, strict=True):
        inside &= (a >= 0) & (a <= most)
    if mode == "trap" and not inside.all():
        at, first = [int(a[~inside][0]) for a in axes], int(lanes.flat[np.argmax(~inside)])
        raise PtxFault(f"access of a surface of {surface.extent} at {at} (x in bytes)", OutOfBoundsError, first)
    x, y, z = (*(np.clip(a, 0, n) for a, n in zip(axes, limits, strict=True)), *(np.zeros_like(layer),) * 2)[:3]
    last = surface.array.shape[0] - 1 if surface.layered else 0
    return (x, y, z, np.clip(layer, 0, last)), inside if mode == "zero" else np.ones(len(layer), bool)


def _find_cells(texels: np.ndarray, place: tuple[np.ndarray, ...], size: int) -> tuple[np.ndarray, np.ndarray]:
    """The memory of a surface as cells of a size, and the index of each lane's first one."""
    x, y, z, layer = place
    rows = np.ravel_multi_index((layer, z, y), texels.shape[:3])
    row = texels.shape[3] * texels.shape[4] * texels.itemsize
    return texels.reshape(-1).view(np.uint8).view(f"u{size}"), (rows * row + x) // size


def _decode_surface(d: PtxDecoder, inst: PtxInstruction, operand: PtxOperand) -> tuple[_TexelAddress, str]:
    mode = next((w for w in inst.op if w in _BOUNDARY), "trap")
    return _decode_texel_address(d, inst, operand, TYPES["s32"]), mode


@decode_rule("suld")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t, parts = TYPES[inst.op[-1]], get_vector_parts(inst.operands[0])
    where, mode = _decode_surface(d, inst, inst.operands[1])
    if inst.op[1] != "b":
        raise d.unsupported(inst)
    writers, size = [d.writer(p, t) for p in parts], t.bits // 8

    def load(m: PtxMachine, lanes: LaneSet) -> None:
        for subset, surface, texels in _group_lanes(m, lanes, where.read, SurfaceObject):
            _check_geometry(surface, where, subset)
            place, inside = _locate_texels(m, subset, where, surface, size * len(parts), mode, True)
            cells, index = _find_cells(texels, place, size)
            for k, write in enumerate(writers):
                write(m, subset, subset.expand(np.where(inside, cells[index + k], 0)).astype(t.dtype))

    return load


@decode_rule("sust")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    """`.b` stores bytes at byte x; `.p` converts 32-bit components to the channels of texel x."""
    t, parts, formatted = TYPES[inst.op[-1]], get_vector_parts(inst.operands[1]), inst.op[1] == "p"
    where, mode = _decode_surface(d, inst, inst.operands[0])
    if inst.op[1] not in "bp" or (formatted and t.bits != 32):
        raise d.unsupported(inst)
    readers = [d.reader(p, TYPES[f"b{t.bits}"]) for p in parts]

    def store(m: PtxMachine, lanes: LaneSet) -> None:
        for subset, surface, texels in _group_lanes(m, lanes, where.read, SurfaceObject):
            _check_geometry(surface, where, subset)
            values = [_compress(m, subset, r) for r in readers]
            if formatted:
                values = [_convert_component(v, surface.array.dtype) for v in values[: surface.channels]]
            size = values[0].dtype.itemsize
            place, inside = _locate_texels(m, subset, where, surface, size * len(values), mode, not formatted)
            cells, index = _find_cells(texels, place, size)
            for k, value in enumerate(values):
                cells[index[inside] + k] = value[inside].view(cells.dtype)

    return store


def _convert_component(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A component of 32 bits as a channel: floats are rounded, integers clamped."""
    if dtype.kind == "f":
        return bits.view(np.float32).astype(dtype)
    info = np.iinfo(dtype)
    return np.clip(bits.view(f"{dtype.kind}4"), info.min, info.max).astype(dtype)


@decode_rule("sured")
def _(d: PtxDecoder, inst: PtxInstruction) -> LaneStep:
    t, name = TYPES[inst.op[-1]], next((w for w in inst.op if w in _SURFACE_REDUCTIONS), None)
    where, mode = _decode_surface(d, inst, inst.operands[0])
    if name is None or inst.op[1] not in "bp":
        raise d.unsupported(inst)
    read, size = d.reader(inst.operands[1], t), t.bits // 8

    def reduce(m: PtxMachine, lanes: LaneSet) -> None:
        for subset, surface, texels in _group_lanes(m, lanes, where.read, SurfaceObject):
            _check_geometry(surface, where, subset)
            place, inside = _locate_texels(m, subset, where, surface, size, mode, inst.op[1] == "b")
            cells, index = _find_cells(texels, place, size)
            reduce_cells(cells, index[inside], _compress(m, subset, read)[inside].view(cells.dtype), name, t)

    return reduce
