"""Elements, fields and pointers."""

from __future__ import annotations

import numpy as np

from tessera.errors import Location
from tessera.interp.target.csl import syntax as s
from tessera.interp.target.csl import types as t
from tessera.interp.target.csl.faults import fail
from tessera.interp.target.csl.sema.coerce import PARTS, code, coerce, plain
from tessera.interp.target.csl.sema.frame import Frame, meaning
from tessera.interp.target.csl.sema.names import current, fetched, read
from tessera.interp.target.csl.sema.operand import Operand, Place, known, members, runtime
from tessera.interp.target.csl.sema.operators import UNARY
from tessera.interp.target.csl.values import Pointer


def guarded(f: Frame, o: Operand) -> str:
    """Code of an index; a signed one is checked, since Python counts negative ones from the end."""
    if o.known:
        return str(int(o.const))
    if isinstance(o.type, t.Int) and not o.type.signed:
        return o.code
    name = f.fresh("i")
    return f"({name} if ({name} := {o.code}) >= 0 else below({name}))"


def index_operand(f: Frame, node: s.Syntax) -> Operand:
    """One index."""
    o = f.value(node)
    if not t.is_integer(o.type) and not isinstance(o.type, t.Enum):
        fail(node.loc, f"array index must be an integer, got: '{o.type}'")
    return o


@meaning(s.Index)
def _index(f: Frame, node: s.Index) -> Operand:
    base = f.operand(node.base)
    if base.type is t.ANON:
        return _member(base, str(f.value(node.indices[0]).const), node.loc)
    if isinstance(base.type, t.Pointee):
        if base.type.many:
            return _through(f, base, index_operand(f, node.indices[0]), node.loc)
        base = dereferenced(f, base, node.loc)
    if not isinstance(base.type, t.Array):
        fail(node.loc, f"type '{base.type}' does not support indexing")
    f.cost += 3
    return element(f, base, [index_operand(f, i) for i in node.indices], node.loc)


def element(f: Frame, base: Operand, indices: list[Operand], loc: Location) -> Operand:
    """One element of an array."""
    type_ = base.type
    assert isinstance(type_, t.Array)
    if len(indices) != len(type_.dims):
        fail(loc, f"expected {len(type_.dims)} indices, {len(indices)} provided")
    for o, n in zip(indices, type_.dims, strict=True):
        if o.known and not 0 <= o.const < n:
            fail(loc, f"index {o.const} is out of bounds for dimension of length {n}")
    if all(o.known for o in indices):
        return _known_element(f, base, type_, indices, loc)
    if base.known:
        base = f.unit.materialised(base, loc)
    assert base.place is not None
    index = _flat_code(f, indices, type_.dims)
    if base.place.index != "0":
        index = f"{base.place.index} + bounded({index}, {type_.count})"
    return read(type_.element, Place(base.place.mutable, base.place.array, index)).at(loc)


def _known_element(f: Frame, base: Operand, type_: t.Array, indices: list[Operand], loc: Location) -> Operand:
    flat = 0
    for o, n in zip(indices, type_.dims, strict=True):
        flat = flat * n + int(o.const)
    place = base.place
    if place is None and base.known:
        return known(type_.element, plain(base.const[flat], type_.element), loc)
    if place is None:
        return read(type_.element, Place(False, base.code, str(flat))).at(loc)
    take = place.take
    if take is not None:
        moved = Place(place.mutable, take=lambda: Pointer(take().array, take().index + flat))
        if base.known:
            data = plain(base.const[flat], type_.element)
            return Operand(type_.element, data, place=moved, loc=loc)
        return fetched(type_.element, moved).at(loc)
    index = str(flat) if place.index == "0" else f"{place.index} + {flat}"
    return read(type_.element, Place(place.mutable, place.array, index)).at(loc)


def _flat_code(f: Frame, indices: list[Operand], dims: tuple[int, ...]) -> str:
    if len(indices) == 1:
        return guarded(f, indices[0])
    text = code(f, indices[0])
    for o, n in zip(indices[1:], dims[1:], strict=True):
        f.cost += 2
        text = f"({text}) * {n} + bounded({code(f, o)}, {n})"
    return f"bounded({text}, {int(np.prod(dims))})"


def _through(f: Frame, base: Operand, index: Operand, loc: Location) -> Operand:
    """`p[i]` with a pointer to many."""
    f.cost += 3
    type_ = base.type
    assert isinstance(type_, t.Pointee)
    if base.known and index.known:
        where: Pointer = base.const
        place = Place(not type_.const, take=lambda: Pointer(where.array, where.index + int(index.const)))
        return fetched(type_.element, place).at(loc)
    array, start = _parts(f, base)
    text = guarded(f, index) if start == "0" else f"above({start} + {code(f, index)})"
    return read(type_.element, Place(not type_.const, array, text)).at(loc)


def _parts(f: Frame, o: Operand) -> tuple[str, str]:
    if o.known:
        return f.unit.constant(o.const.array), str(o.const.index)
    name = o.code
    if not name.isidentifier():
        name = f.fresh("p")
        f.emit(f"{name} = {o.code}", o.loc)
    return f"{name}[0]", f"{name}[1]"


@meaning(s.Dereference)
def _dereference(f: Frame, node: s.Dereference) -> Operand:
    base = f.operand(node.base)
    if not isinstance(base.type, t.Pointee):
        fail(node.loc, f"cannot dereference non-pointer type '{base.type}'")
    f.cost += 2
    return dereferenced(f, base, node.loc)


def dereferenced(f: Frame, base: Operand, loc: Location) -> Operand:
    """`p.*`."""
    type_ = base.type
    assert isinstance(type_, t.Pointee)
    if base.known:
        return fetched(type_.element, Place(not type_.const, take=lambda: base.const)).at(loc)
    array, index = _parts(f, base)
    return read(type_.element, Place(not type_.const, array, index)).at(loc)


@meaning(s.Field)
def _field(f: Frame, node: s.Field) -> Operand:
    base = f.operand(node.base)
    if isinstance(base.type, t.Pointee) and isinstance(base.type.element, t.Struct):
        base = dereferenced(f, base, node.loc)
    if base.type is t.MODULE:
        found = base.const.lookup(node.name, node.loc)
        if found is None:
            fail(node.loc, f"use of undeclared identifier '{node.name}' in module '{base.const.title}'")
        return current(found).at(node.loc) if found.place else found
    if base.type is t.ANON:
        return _member(base, node.name, node.loc)
    if base.type in PARTS:
        return _member(PARTS[base.type](base), node.name, node.loc)
    if base.type is t.TYPE and isinstance(base.const, t.Enum):
        return coerce(f, known(t.ENUM_LITERAL, node.name), base.const, node.loc)
    if isinstance(base.type, t.Struct):
        return _struct_field(f, base, base.type, node)
    fail(node.loc, f"type '{base.type}' has no field named '{node.name}'")


def _member(base: Operand, name: str, loc: Location) -> Operand:
    found = members(base).get(name)
    if found is None:
        fail(loc, f"no field named '{name}' in struct '{base.type}'")
    return found


def _struct_field(f: Frame, base: Operand, struct: t.Struct, node: s.Field) -> Operand:
    type_ = struct.field(node.name)
    if type_ is None:
        fail(node.loc, f"struct '{struct}' has no field named '{node.name}'")
    if base.known:
        where = base.const[node.name]
        view = where.reshape(-1) if isinstance(type_, t.Array) else where
        mutable = base.place is not None and base.place.mutable
        return fetched(type_, Place(mutable, take=lambda: Pointer(view, 0))).at(node.loc)
    f.cost += 2
    place = base.place or Place(False, base.code, "0")
    if isinstance(type_, t.Array):
        return read(type_, Place(place.mutable, f"{place.array}[{node.name!r}][{place.index}].reshape(-1)", "0"))
    return read(type_, Place(place.mutable, f"{place.array}[{node.name!r}]", place.index)).at(node.loc)


def _address(f: Frame, node: s.Unary) -> Operand:
    o = f.operand(node.operand)
    if isinstance(o.type, t.Fn):
        return o
    if o.place is None and o.known:
        o = f.unit.materialised(o, node.loc)
    if o.place is None:
        fail(node.loc, "cannot take the address of a value that is not in memory")
    type_ = t.Pointee("", o.type, const=not o.place.mutable)
    if o.place.take is not None:
        return known(type_, o.place.take(), node.loc)
    return runtime(type_, f"Pointer({o.place.array}, {o.place.index})", node.loc)


UNARY["&"] = _address
