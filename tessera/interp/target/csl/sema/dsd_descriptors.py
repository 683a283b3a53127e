"""`@get_dsd`: tensor accesses as affine forms, and the memory and fabric DSDs that they define."""

from __future__ import annotations

from typing import NamedTuple

from tessera.core.errors import Location
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.access import dereference_pointer, evaluate_type
from tessera.interp.target.csl.sema.builtins import register_builtin
from tessera.interp.target.csl.sema.coercion import STRUCT_VIEWS, coerce, render_code, render_pointer
from tessera.interp.target.csl.sema.context import (
    AnalysisContext,
    ExprValue,
    list_members,
    make_anonymous_struct,
    make_known,
    make_runtime,
    register_rule,
)
from tessera.interp.target.csl.sema.values import Circular, Fabin, Fabout, Mem1d, Mem4d
from tessera.interp.target.csl.text import syntax as s
from tessera.interp.target.csl.text.diagnostics import fail, type_mismatch

TENSOR_ACCESS = t.CslComptime("tensor access")


class TensorAccess(NamedTuple):
    """`|i|{n} -> A[2*i + 1]`: the base offset and the stride of each variable, in elements."""

    base: ExprValue
    extents: tuple[ExprValue, ...]
    strides: tuple[int, ...]
    offset: int


@register_rule(s.AffineAccessExpr)
def _evaluate_affine_access(f: AnalysisContext, node: s.AffineAccessExpr) -> ExprValue:
    if not isinstance(node.body, s.SubscriptExpr):
        fail(node.loc, "a tensor access must index an array")
    if len(node.names) != len(node.extents):
        fail(node.loc, f"expected {len(node.names)} extents, {len(node.extents)} provided")
    extents = tuple(coerce(f, f.evaluate(e), t.U16, e.loc) for e in node.extents)
    base = f.evaluate_operand(node.body.base)
    if isinstance(base.type, t.CslPointer) and isinstance(base.type.element, t.CslArray):
        base = dereference_pointer(f, base, node.loc)
    dims = base.type.dims if isinstance(base.type, t.CslArray) else (0,)
    if not isinstance(base.type, (t.CslArray, t.CslPointer)):
        type_mismatch(node.body.loc, "array", base.type)
    if len(node.body.indices) != len(dims):
        fail(node.body.loc, f"expected {len(dims)} indices, {len(node.body.indices)} provided")
    strides, offset = dict.fromkeys(node.names, 0), 0
    for index, dim in zip(node.body.indices, dims, strict=True):
        row = _linear_form(f, index, node.names)
        strides = {n: strides[n] * dim + row.get(n, 0) for n in node.names}
        offset = offset * dim + row.get("", 0)
    address = _base_address(f, base, node.loc)
    access = TensorAccess(address, extents, tuple(strides[n] for n in node.names), offset)
    return make_known(TENSOR_ACCESS, access, node.loc)


def _base_address(f: AnalysisContext, base: ExprValue, loc: Location) -> ExprValue:
    if isinstance(base.type, t.CslPointer):
        return base
    if base.place is None or (base.known and base.place.take is None):
        base = f.unit.materialise(base, loc)
    assert base.place is not None and isinstance(base.type, t.CslArray)
    type_ = t.CslPointer("", base.type.element, many=True)
    if base.place.take is not None:
        return make_known(type_, base.place.take(), loc)
    return make_runtime(type_, f"Pointer({base.place.array}, {base.place.index})", loc)


def _linear_form(f: AnalysisContext, node: s.SyntaxNode, names: tuple[str, ...]) -> dict[str, int]:
    """The coefficients of an index by variable; the constant has the key ""."""
    if isinstance(node, s.NameExpr) and node.text in names:
        return {node.text: 1}
    if isinstance(node, s.BinaryExpr) and node.sign in ("+", "-", "*"):
        a, b = _linear_form(f, node.left, names), _linear_form(f, node.right, names)
        if node.sign != "*":
            sign = 1 if node.sign == "+" else -1
            return {n: a.get(n, 0) + sign * b.get(n, 0) for n in (*a, *b)}
        if set(a) - {""} and set(b) - {""}:
            fail(node.loc, "index of a tensor access must be affine")
        varying, factor = (a, b.get("", 0)) if set(a) - {""} else (b, a.get("", 0))
        return {n: v * factor for n, v in varying.items()}
    if isinstance(node, s.UnaryExpr) and node.sign == "-":
        return {n: -v for n, v in _linear_form(f, node.operand, names).items()}
    o = f.evaluate_operand(node)
    if not o.known:
        fail(node.loc, "invalid use of non-loop variable in affine expression")
    if not t.is_integer(o.type):
        type_mismatch(node.loc, "integer", o.type)
    return {"": int(o.const)}


@register_builtin("get_dsd", 2)
def _get_dsd(f: AnalysisContext, node: s.BuiltinCall) -> ExprValue:
    type_ = evaluate_type(f, node.args[0])
    build = _DSD_KINDS.get(type_)
    if build is None:
        type_mismatch(node.args[0].loc, "DSD type", type_)
    o = f.evaluate_operand(node.args[1])
    if o.type is not t.ANON:
        type_mismatch(node.args[1].loc, t.ANON, o.type)
    fields, (read, allowed) = list_members(o), build
    for name in fields:
        if name not in allowed.split():
            fail(node.args[1].loc, f"unexpected field '{name}' for '{type_}'")
    found = read(f, fields, node.loc)
    f.cost += 0 if found.known else COSTS.descriptor
    return found


def _coerce_field(
    f: AnalysisContext, fields: dict[str, ExprValue], name: str, type_: t.CslType, default: int, loc: Location
) -> ExprValue:
    o = fields.get(name)
    return make_known(type_, default) if o is None else coerce(f, o, type_, loc)


def _require_field(fields: dict[str, ExprValue], name: str, kind: str, loc: Location) -> ExprValue:
    if name not in fields:
        fail(loc, f"missing field '{name}' for '{kind}'")
    return fields[name]


def _read_flag(fields: dict[str, ExprValue], name: str) -> bool:
    return name in fields and bool(fields[name].const)


def _evaluate_memory_access(f: AnalysisContext, fields: dict[str, ExprValue], kind: str, loc: Location) -> TensorAccess:
    if "tensor_access" in fields:
        o = fields["tensor_access"]
        if o.type is t.ANON:
            return _evaluate_memory_access(f, list_members(o), kind, loc)
        if o.type is not TENSOR_ACCESS:
            type_mismatch(loc, "tensor access", o.type)
        return o.const
    base = _require_field(fields, "base_address", kind, loc)
    if not isinstance(base.type, t.CslPointer):
        type_mismatch(loc, "pointer", base.type)
    extent = _require_field(fields, "extent", kind, loc)
    if extent.type is t.ANON or isinstance(extent.type, t.CslArray):
        return _strided_access(f, fields, base, loc)
    extent = coerce(f, extent, t.U16, loc)
    stride = _coerce_field(f, fields, "stride", t.I8, 1, loc)
    offset = _coerce_field(f, fields, "offset", t.I16, 0, loc)
    if not (stride.known and offset.known):
        return TensorAccess(_shift_base(f, base, offset), (extent,), (), 0)
    return TensorAccess(base, (extent,), (int(stride.const),), int(offset.const))


def _access_as_struct(o: ExprValue) -> ExprValue:
    """A tensor access as a struct: strides between steps, innermost first."""
    access: TensorAccess = o.const
    sizes, steps = [int(e.const) for e in access.extents], []
    for place in range(len(sizes) - 1, -1, -1):
        inner = zip(access.strides[place + 1 :], sizes[place + 1 :], strict=True)
        steps.append(make_known(t.I16, access.strides[place] - sum(c * (n - 1) for c, n in inner)))
    rows = {"base_address": access.base, "offset": make_known(t.I16, access.offset)}
    for name, values in (("stride", steps), ("extent", access.extents)):
        rows[name] = make_anonymous_struct({str(i): value for i, value in enumerate(values)}, o.loc)
    return make_anonymous_struct(rows, o.loc)


STRUCT_VIEWS[TENSOR_ACCESS] = _access_as_struct


def _comptime_integers(o: ExprValue, loc: Location) -> list[int]:
    """The integers of a comptime tuple or array."""
    if not o.known:
        fail(loc, "strides and extents of a 'mem4d_dsd' are not known at compile time")
    return [int(v) for v in o.const] if isinstance(o.type, t.CslArray) else [int(v.data) for v in o.const.values()]


def _strided_access(f: AnalysisContext, fields: dict[str, ExprValue], base: ExprValue, loc: Location) -> TensorAccess:
    """The tensor access of hardware strides.

    A hardware stride is the step to the next element when a variable increments and all inner variables reset to zero.
    Strides are ordered innermost first, extents outermost first.
    """
    extents = _comptime_integers(fields["extent"], loc)
    steps = _comptime_integers(fields["stride"], loc) if "stride" in fields else [1] * len(extents)
    if len(steps) != len(extents):
        fail(loc, f"expected {len(extents)} strides, {len(steps)} provided")
    strides_: list[int] = []
    for step in steps:
        inner = extents[len(extents) - len(strides_) :]
        strides_.insert(0, step + sum(c * (n - 1) for c, n in zip(strides_, inner, strict=True)))
    offset = int(_coerce_field(f, fields, "offset", t.I16, 0, loc).const)
    return TensorAccess(base, tuple(make_known(t.U16, n) for n in extents), tuple(strides_), offset)


def _shift_base(f: AnalysisContext, base: ExprValue, offset: ExprValue) -> ExprValue:
    text = f"offset_pointer({render_code(f, base)}, {render_code(f, offset)})"
    return make_runtime(base.type, text, base.loc)


def _element_type(base: ExprValue) -> t.CslType:
    type_ = base.type
    assert isinstance(type_, t.CslPointer)
    return type_.element.element if isinstance(type_.element, t.CslArray) else type_.element


def _make_mem1d(f: AnalysisContext, fields: dict[str, ExprValue], loc: Location) -> ExprValue:
    access = _evaluate_memory_access(f, fields, "mem1d_dsd", loc)
    if len(access.extents) != 1:
        fail(loc, f"'mem1d_dsd' expects 1 loop variable, {len(access.extents)} provided")
    size, indexed, extent = (
        _element_type(access.base).size,
        _read_flag(fields, "wavelet_index_offset"),
        access.extents[0],
    )
    if not access.strides:
        stride = render_code(f, _coerce_field(f, fields, "stride", t.I8, 1, loc))
        array, index = render_pointer(f, access.base)
        return make_runtime(
            t.MEM1D, f"Mem1d({array}, {index} * {size}, {stride}, {render_code(f, extent)}, {indexed})", loc
        )
    limits = t.I16 if f.unit.options.arch == "wse3" else t.I8  # public programs for WSE-3 have strides of 9 bits
    if not limits.low <= access.strides[0] <= limits.high:
        fail(loc, f"stride {access.strides[0]} does not fit in '{limits}'")
    if access.base.known and extent.known:
        array, index = access.base.const
        byte = (index + access.offset) * size
        return make_known(t.MEM1D, Mem1d(array, byte, access.strides[0], int(extent.const), indexed), loc)
    array, index = render_pointer(f, access.base)
    byte = f"({index} + {access.offset}) * {size}"
    return make_runtime(
        t.MEM1D, f"Mem1d({array}, {byte}, {access.strides[0]}, {render_code(f, extent)}, {indexed})", loc
    )


def _make_mem4d(f: AnalysisContext, fields: dict[str, ExprValue], loc: Location) -> ExprValue:
    access = _evaluate_memory_access(f, fields, "mem4d_dsd", loc)
    if not 1 <= len(access.extents) <= 4:
        fail(loc, f"'mem4d_dsd' expects 1 to 4 loop variables, {len(access.extents)} provided")
    size, indexed = _element_type(access.base).size, _read_flag(fields, "wavelet_index_offset")
    if len(access.strides) != len(access.extents):
        fail(loc, f"expected {len(access.extents)} strides, {len(access.strides)} provided")
    if access.base.known and all(e.known for e in access.extents):
        array, index = access.base.const
        extents = tuple(int(e.const) for e in access.extents)
        return make_known(t.MEM4D, Mem4d(array, (index + access.offset) * size, access.strides, extents, indexed), loc)
    array, index = render_pointer(f, access.base)
    extents_code = ", ".join(render_code(f, e) for e in access.extents)
    byte = f"({index} + {access.offset}) * {size}"
    return make_runtime(t.MEM4D, f"Mem4d({array}, {byte}, {access.strides}, ({extents_code},), {indexed})", loc)


def _make_circbuf(f: AnalysisContext, fields: dict[str, ExprValue], loc: Location) -> ExprValue:
    access = _evaluate_memory_access(f, fields, "circbuf_dsd", loc)
    if not (access.base.known and access.extents[0].known):
        fail(loc, "the buffer of a 'circbuf_dsd' is not known at compile time")
    array, index = access.base.const
    return make_known(
        t.CIRCBUF, Circular(array, index * _element_type(access.base).size, int(access.extents[0].const)), loc
    )


def _make_fabric_dsd(f: AnalysisContext, fields: dict[str, ExprValue], loc: Location, kind: t.CslType) -> ExprValue:
    side, queue_type = ("input_queue", t.INPUT_QUEUE) if kind is t.FABIN else ("output_queue", t.OUTPUT_QUEUE)
    if "fabric_color" not in fields and side not in fields:
        fail(loc, f"missing field 'fabric_color' for '{kind}'")
    color = _coerce_field(f, fields, "fabric_color", t.COLOR, -1, loc)
    if color.code in f.unit.constant_calls:  # the vendor's compiler inlines the call: the descriptor is constant
        color = make_known(t.COLOR, f.unit.constant_calls[color.code], loc)
    queue = _coerce_field(f, fields, side, queue_type, -1, loc)
    extent = coerce(f, _require_field(fields, "extent", str(kind), loc), t.U16, loc)
    parts, dsd_class = [color, extent, queue], Fabin if kind is t.FABIN else Fabout
    flags = _fabric_flags(fields, kind, loc)
    if all(o.known for o in parts):
        return make_known(kind, dsd_class(*[int(o.const) for o in parts], **flags), loc)  # type: ignore[arg-type]
    texts = [render_code(f, o) for o in parts] + [f"{name}={value}" for name, value in flags.items()]
    return make_runtime(kind, f"{dsd_class.__name__}({', '.join(texts)})", loc)


_SIMD_MODES = ("simd_32", "simd_64", "simd_32_or_64", "simd_max")


def _fabric_flags(fields: dict[str, ExprValue], kind: t.CslType, loc: Location) -> dict[str, int]:
    """The flags of a fabric DSD.

    `simd_mode` packs two 16-bit elements into a wavelet. An operation that receives with `simd_64` continues with two
    wavelets, with the others with one.
    """
    flags: dict[str, int] = {
        "control": _read_flag(fields, "control"),
        "transform": _read_flag(fields, "control_transform"),
    }
    if "simd_mode" in fields:
        mode = _selected_name(fields["simd_mode"], _SIMD_MODES, "SIMD mode", loc)
        flags["lanes"] = 2
        if kind is t.FABIN:
            flags["in_pairs"] = mode == "simd_64"
    if kind is t.FABOUT:
        flags |= {
            "indexed": _read_flag(fields, "wavelet_index_offset"),
            "advance": _read_flag(fields, "advance_switch"),
        }
    if kind is t.FABOUT and "zero" in fields:
        sources = ("first_source", "second_source")
        flags["cleared"] = sources.index(_selected_name(fields["zero"], sources, "source to set to zero", loc))
    return flags


def _selected_name(o: ExprValue, names: tuple[str, ...], what: str, loc: Location) -> str:
    """The name that is true in `.{ .name = true }`."""
    chosen = [n for n, value in list_members(o).items() if value.known and value.const] if o.type is t.ANON else []
    if len(chosen) != 1 or chosen[0] not in names:
        fail(loc, f"expected one {what}, {' or '.join(names)}, set to true")
    return chosen[0]


def _make_fabin(f: AnalysisContext, fields: dict[str, ExprValue], loc: Location) -> ExprValue:
    return _make_fabric_dsd(f, fields, loc, t.FABIN)


def _make_fabout(f: AnalysisContext, fields: dict[str, ExprValue], loc: Location) -> ExprValue:
    return _make_fabric_dsd(f, fields, loc, t.FABOUT)


_MEMORY_FIELDS = "tensor_access base_address extent stride offset wavelet_index_offset"
_FABRIC_FIELDS = "fabric_color extent control control_transform priority simd_mode"
_DSD_KINDS = {
    t.MEM1D: (_make_mem1d, _MEMORY_FIELDS),
    t.MEM4D: (_make_mem4d, _MEMORY_FIELDS),
    t.CIRCBUF: (_make_circbuf, _MEMORY_FIELDS),
    t.FABIN: (_make_fabin, "input_queue wavelet_index_offset " + _FABRIC_FIELDS),
    t.FABOUT: (_make_fabout, "output_queue wavelet_index_offset advance_switch zero " + _FABRIC_FIELDS),
}
