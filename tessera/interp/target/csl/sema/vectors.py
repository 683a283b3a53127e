"""`@get_dsd`: tensor accesses as linear forms, and the descriptors of memory and fabric."""

from __future__ import annotations

from typing import NamedTuple

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail, type_mismatch
from tessera.interp.target.csl.sema.access import dereferenced
from tessera.interp.target.csl.sema.builtins import builtin
from tessera.interp.target.csl.sema.coerce import PARTS, code, coerce, pointer_code
from tessera.interp.target.csl.sema.frame import Frame, meaning
from tessera.interp.target.csl.sema.names import type_of
from tessera.interp.target.csl.sema.operand import Operand, anonymous, known, members, runtime
from tessera.interp.target.csl.values import Circular, Fabin, Fabout, Mem1d, Mem4d

ACCESS = t.Comptime("tensor access")


class Access(NamedTuple):
    """`|i|{n} -> A[2*i + 1]`: where it begins and how far each variable moves, in elements."""

    base: Operand
    extents: tuple[Operand, ...]
    strides: tuple[int, ...]
    offset: int


@meaning(s.Affine)
def _affine(f: Frame, node: s.Affine) -> Operand:
    if not isinstance(node.body, s.Index):
        fail(node.loc, "a tensor access must index an array")
    if len(node.names) != len(node.extents):
        fail(node.loc, f"expected {len(node.names)} extents, {len(node.extents)} provided")
    extents = tuple(coerce(f, f.value(e), t.U16, e.loc) for e in node.extents)
    base = f.operand(node.body.base)
    if isinstance(base.type, t.Pointee) and isinstance(base.type.element, t.Array):
        base = dereferenced(f, base, node.loc)
    dims = base.type.dims if isinstance(base.type, t.Array) else (0,)
    if not isinstance(base.type, (t.Array, t.Pointee)):
        type_mismatch(node.body.loc, "array", base.type)
    if len(node.body.indices) != len(dims):
        fail(node.body.loc, f"expected {len(dims)} indices, {len(node.body.indices)} provided")
    strides, offset = dict.fromkeys(node.names, 0), 0
    for index, dim in zip(node.body.indices, dims, strict=True):
        row = _linear(f, index, node.names)
        strides = {n: strides[n] * dim + row.get(n, 0) for n in node.names}
        offset = offset * dim + row.get("", 0)
    address = _address(f, base, node.loc)
    access = Access(address, extents, tuple(strides[n] for n in node.names), offset)
    return known(ACCESS, access, node.loc)


def _address(f: Frame, base: Operand, loc: Location) -> Operand:
    if isinstance(base.type, t.Pointee):
        return base
    if base.place is None or (base.known and base.place.take is None):
        base = f.unit.materialised(base, loc)
    assert base.place is not None and isinstance(base.type, t.Array)
    type_ = t.Pointee("", base.type.element, many=True)
    if base.place.take is not None:
        return known(type_, base.place.take(), loc)
    return runtime(type_, f"Pointer({base.place.array}, {base.place.index})", loc)


def _linear(f: Frame, node: s.Syntax, names: tuple[str, ...]) -> dict[str, int]:
    """An index as coefficients by variable; the constant is under ""."""
    if isinstance(node, s.Name) and node.text in names:
        return {node.text: 1}
    if isinstance(node, s.Binary) and node.sign in ("+", "-", "*"):
        a, b = _linear(f, node.left, names), _linear(f, node.right, names)
        if node.sign != "*":
            sign = 1 if node.sign == "+" else -1
            return {n: a.get(n, 0) + sign * b.get(n, 0) for n in (*a, *b)}
        if set(a) - {""} and set(b) - {""}:
            fail(node.loc, "index of a tensor access must be affine")
        varying, factor = (a, b.get("", 0)) if set(a) - {""} else (b, a.get("", 0))
        return {n: v * factor for n, v in varying.items()}
    if isinstance(node, s.Unary) and node.sign == "-":
        return {n: -v for n, v in _linear(f, node.operand, names).items()}
    o = f.operand(node)
    if not o.known:
        fail(node.loc, "invalid use of non-loop variable in affine expression")
    if not t.is_integer(o.type):
        type_mismatch(node.loc, "integer", o.type)
    return {"": int(o.const)}


@builtin("get_dsd", 2)
def _get_dsd(f: Frame, node: s.Builtin) -> Operand:
    type_ = type_of(f, node.args[0])
    build = _KINDS.get(type_)
    if build is None:
        type_mismatch(node.args[0].loc, "DSD type", type_)
    o = f.operand(node.args[1])
    if o.type is not t.ANON:
        type_mismatch(node.args[1].loc, t.ANON, o.type)
    fields, (read, allowed) = members(o), build
    for name in fields:
        if name not in allowed.split():
            fail(node.args[1].loc, f"unexpected field '{name}' for '{type_}'")
    f.cost += 4
    return read(f, fields, node.loc)


def _field(f: Frame, fields: dict[str, Operand], name: str, type_: t.Type, default: int, loc: Location) -> Operand:
    o = fields.get(name)
    return known(type_, default) if o is None else coerce(f, o, type_, loc)


def _required(fields: dict[str, Operand], name: str, kind: str, loc: Location) -> Operand:
    if name not in fields:
        fail(loc, f"missing field '{name}' for '{kind}'")
    return fields[name]


def _flag(fields: dict[str, Operand], name: str) -> bool:
    return name in fields and bool(fields[name].const)


def _memory_access(f: Frame, fields: dict[str, Operand], kind: str, loc: Location) -> Access:
    if "tensor_access" in fields:
        o = fields["tensor_access"]
        if o.type is t.ANON:
            return _memory_access(f, members(o), kind, loc)
        if o.type is not ACCESS:
            type_mismatch(loc, "tensor access", o.type)
        return o.const
    base = _required(fields, "base_address", kind, loc)
    if not isinstance(base.type, t.Pointee):
        type_mismatch(loc, "pointer", base.type)
    extent = _required(fields, "extent", kind, loc)
    if extent.type is t.ANON or isinstance(extent.type, t.Array):
        return _stepped(f, fields, base, loc)
    extent = coerce(f, extent, t.U16, loc)
    stride = _field(f, fields, "stride", t.I8, 1, loc)
    offset = _field(f, fields, "offset", t.I16, 0, loc)
    if not (stride.known and offset.known):
        return Access(_moved(f, base, offset), (extent,), (), 0)
    return Access(base, (extent,), (int(stride.const),), int(offset.const))


def _parts(o: Operand) -> Operand:
    """A tensor access as the struct that it stands for: its strides are steps, the innermost first."""
    access: Access = o.const
    sizes, steps = [int(e.const) for e in access.extents], []
    for place in range(len(sizes) - 1, -1, -1):
        inner = zip(access.strides[place + 1 :], sizes[place + 1 :], strict=True)
        steps.append(known(t.I16, access.strides[place] - sum(c * (n - 1) for c, n in inner)))
    rows = {"base_address": access.base, "offset": known(t.I16, access.offset)}
    for name, values in (("stride", steps), ("extent", access.extents)):
        rows[name] = anonymous({str(i): value for i, value in enumerate(values)}, o.loc)
    return anonymous(rows, o.loc)


PARTS[ACCESS] = _parts


def _numbers(o: Operand, loc: Location) -> list[int]:
    """The integers of a comptime tuple or array."""
    if not o.known:
        fail(loc, "strides and extents of a 'mem4d_dsd' are not known at compile time")
    return [int(v) for v in o.const] if isinstance(o.type, t.Array) else [int(v.data) for v in o.const.values()]


def _stepped(f: Frame, fields: dict[str, Operand], base: Operand, loc: Location) -> Access:
    """Strides as the hardware takes them: the step to the next element when a variable goes up by one and those
    inside it go back to zero. They are given innermost first, the extents outermost first."""
    extents = _numbers(fields["extent"], loc)
    steps = _numbers(fields["stride"], loc) if "stride" in fields else [1] * len(extents)
    if len(steps) != len(extents):
        fail(loc, f"expected {len(extents)} strides, {len(steps)} provided")
    found: list[int] = []
    for step in steps:
        inner = extents[len(extents) - len(found) :]
        found.insert(0, step + sum(c * (n - 1) for c, n in zip(found, inner, strict=True)))
    offset = int(_field(f, fields, "offset", t.I16, 0, loc).const)
    return Access(base, tuple(known(t.U16, n) for n in extents), tuple(found), offset)


def _moved(f: Frame, base: Operand, offset: Operand) -> Operand:
    text = f"shifted({code(f, base)}, {code(f, offset)})"
    return runtime(base.type, text, base.loc)


def _element(base: Operand) -> t.Type:
    type_ = base.type
    assert isinstance(type_, t.Pointee)
    return type_.element.element if isinstance(type_.element, t.Array) else type_.element


def _mem1d(f: Frame, fields: dict[str, Operand], loc: Location) -> Operand:
    access = _memory_access(f, fields, "mem1d_dsd", loc)
    if len(access.extents) != 1:
        fail(loc, f"'mem1d_dsd' expects 1 loop variable, {len(access.extents)} provided")
    size, indexed, extent = _element(access.base).size, _flag(fields, "wavelet_index_offset"), access.extents[0]
    if not access.strides:
        stride = code(f, _field(f, fields, "stride", t.I8, 1, loc))
        array, index = pointer_code(f, access.base)
        return runtime(t.MEM1D, f"Mem1d({array}, {index} * {size}, {stride}, {code(f, extent)}, {indexed})", loc)
    if not -128 <= access.strides[0] <= 127:
        fail(loc, f"stride {access.strides[0]} does not fit in 'i8'")
    if access.base.known and extent.known:
        array, index = access.base.const
        byte = (index + access.offset) * size
        return known(t.MEM1D, Mem1d(array, byte, access.strides[0], int(extent.const), indexed), loc)
    array, index = pointer_code(f, access.base)
    byte = f"({index} + {access.offset}) * {size}"
    return runtime(t.MEM1D, f"Mem1d({array}, {byte}, {access.strides[0]}, {code(f, extent)}, {indexed})", loc)


def _mem4d(f: Frame, fields: dict[str, Operand], loc: Location) -> Operand:
    access = _memory_access(f, fields, "mem4d_dsd", loc)
    if not 1 <= len(access.extents) <= 4:
        fail(loc, f"'mem4d_dsd' expects 1 to 4 loop variables, {len(access.extents)} provided")
    size, indexed = _element(access.base).size, _flag(fields, "wavelet_index_offset")
    if len(access.strides) != len(access.extents):
        fail(loc, f"expected {len(access.extents)} strides, {len(access.strides)} provided")
    if access.base.known and all(e.known for e in access.extents):
        array, index = access.base.const
        extents = tuple(int(e.const) for e in access.extents)
        return known(t.MEM4D, Mem4d(array, (index + access.offset) * size, access.strides, extents, indexed), loc)
    array, index = pointer_code(f, access.base)
    extents_code = ", ".join(code(f, e) for e in access.extents)
    byte = f"({index} + {access.offset}) * {size}"
    return runtime(t.MEM4D, f"Mem4d({array}, {byte}, {access.strides}, ({extents_code},), {indexed})", loc)


def _circular(f: Frame, fields: dict[str, Operand], loc: Location) -> Operand:
    access = _memory_access(f, fields, "circbuf_dsd", loc)
    if not (access.base.known and access.extents[0].known):
        fail(loc, "the buffer of a 'circbuf_dsd' is not known at compile time")
    array, index = access.base.const
    return known(t.CIRCBUF, Circular(array, index * _element(access.base).size, int(access.extents[0].const)), loc)


def _fabric(f: Frame, fields: dict[str, Operand], loc: Location, kind: t.Type) -> Operand:
    side, queue_type = ("input_queue", t.INPUT_QUEUE) if kind is t.FABIN else ("output_queue", t.OUTPUT_QUEUE)
    if "fabric_color" not in fields and side not in fields:
        fail(loc, f"missing field 'fabric_color' for '{kind}'")
    color = _field(f, fields, "fabric_color", t.COLOR, -1, loc)
    queue = _field(f, fields, side, queue_type, -1, loc)
    extent = coerce(f, _required(fields, "extent", str(kind), loc), t.U16, loc)
    parts, made = [color, extent, queue], Fabin if kind is t.FABIN else Fabout
    flags = _flags(fields, kind, loc)
    if all(o.known for o in parts):
        return known(kind, made(*[int(o.const) for o in parts], **flags), loc)  # type: ignore[arg-type]
    texts = [code(f, o) for o in parts] + [f"{name}={value}" for name, value in flags.items()]
    return runtime(kind, f"{made.__name__}({', '.join(texts)})", loc)


def _flags(fields: dict[str, Operand], kind: t.Type, loc: Location) -> dict[str, int]:
    """What a fabric descriptor does beside moving words; `simd_mode` puts two 16-bit elements into a wavelet (the
    modes differ in when an operation goes on, which is not modelled)."""
    found: dict[str, int] = {"control": _flag(fields, "control"), "transform": _flag(fields, "control_transform")}
    if "simd_mode" in fields:
        _choice(fields["simd_mode"], ("simd_32", "simd_64", "simd_32_or_64"), "SIMD mode", loc)
        found["lanes"] = 2
    if kind is t.FABOUT:
        found |= {"indexed": _flag(fields, "wavelet_index_offset"), "advance": _flag(fields, "advance_switch")}
    if kind is t.FABOUT and "zero" in fields:
        sources = ("first_source", "second_source")
        found["cleared"] = sources.index(_choice(fields["zero"], sources, "source to set to zero", loc))
    return found


def _choice(o: Operand, names: tuple[str, ...], what: str, loc: Location) -> str:
    """The name that is true in `.{ .name = true }`."""
    chosen = [n for n, value in members(o).items() if value.known and value.const] if o.type is t.ANON else []
    if len(chosen) != 1 or chosen[0] not in names:
        fail(loc, f"expected one {what}, {' or '.join(names)}, set to true")
    return chosen[0]


def _fabin(f: Frame, fields: dict[str, Operand], loc: Location) -> Operand:
    return _fabric(f, fields, loc, t.FABIN)


def _fabout(f: Frame, fields: dict[str, Operand], loc: Location) -> Operand:
    return _fabric(f, fields, loc, t.FABOUT)


_MEMORY_FIELDS = "tensor_access base_address extent stride offset wavelet_index_offset"
_FABRIC_FIELDS = "fabric_color extent control control_transform priority simd_mode"
_KINDS = {
    t.MEM1D: (_mem1d, _MEMORY_FIELDS),
    t.MEM4D: (_mem4d, _MEMORY_FIELDS),
    t.CIRCBUF: (_circular, _MEMORY_FIELDS),
    t.FABIN: (_fabin, "input_queue wavelet_index_offset " + _FABRIC_FIELDS),
    t.FABOUT: (_fabout, "output_queue wavelet_index_offset advance_switch zero " + _FABRIC_FIELDS),
}
