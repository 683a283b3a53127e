"""Products of matrices on one element: an operation on a row, or a column, of the result for each factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tessera.codegen.csl.blocks import emit
from tessera.codegen.csl.descriptors import LONGEST_STRIDE
from tessera.codegen.csl.element import Element
from tessera.codegen.csl.scalars import literal, widen
from tessera.codegen.csl.views import View, merged
from tessera.lower.mesh.costs import INNER, LINES, OUTER, cheapest, lines, ways
from tessera.ops import linalg, mesh
from tessera.types import DType


@emit(linalg.dot)
def _(element, node, a, b):
    out = element.fresh(node.out.type)
    element.copy(out, View(out.type, out.shape, literal=literal(0, node.out.type.dtype)))
    _add_products(element, out, a, b, node.types)
    return out


@emit(mesh.multiply_add)
def _(element, node, total, a, b):
    out = element.successor(node.args[0], total)
    _add_products(element, out, a, b, node.types[1:])
    return out


def _add_products(element: Element, out: View, a: View, b: View, types: Sequence[Any]) -> None:
    """out += a b, for each of a batch; `types` are those of the factors."""
    way = _way(element, out, a, b)
    kept = way == LINES and _MULTIPLY_ADD.get((out.type, a.type, b.type)) and not (a.literal or b.literal)
    left, right = (
        (a, b) if kept else (_alike(element, x, out.type, t.dtype) for x, t in zip((a, b), types, strict=True))
    )
    batch = out.shape[:-2]
    names = [f"b{next(element.names)}" for _ in batch]
    for name, size in zip(names, batch, strict=True):
        element.say(f"for (@range(i16, {size})) |{name}| {{")
        element.depth += 1
    if out.size * a.shape[-1] and not (way in WAYS and WAYS[way](element, out, left, right, names)):
        _lines(element, out, left, right, names)
    for _ in batch:
        element.depth -= 1
        element.say("}")
    for made, given in ((left, a), (right, b)):
        if made is not given:
            element.release(made)


def _alike(element: Element, x: View, kind: str, dtype: DType) -> View:
    """A view as elements of the type in which is summed."""
    if x.literal:
        return replace(x, type=kind, literal=f"@as({kind}, {widen(element, dtype, x.literal)})")
    if x.type == kind:
        return x
    made = element.room(x.shape, kind)
    if (x.type, kind) != ("f16", "f32") or not element.operation("@fh2s", [made, x]):
        element.loop([made, x], lambda t: f"{t[0]} = @as({kind}, {widen(element, dtype, t[1])});")
    return made


def _way(element: Element, out: View, a: View, b: View) -> str:
    """The way that takes the fewest cycles, of those that the operands allow."""
    if out.type != "f32" or a.literal or b.literal or not element.fuses or not out.size:
        return LINES
    found = ways(out.shape[-2], out.shape[-1], a.shape[-1], element.wide)
    if element.sparing:  # "outer" needs room for the products
        found.pop(OUTER)
    return cheapest(found)


def _lines(element: Element, out: View, a: View, b: View, batch: list[str]) -> None:
    """A row (or, where that takes fewer cycles, a column) of the result at a time."""
    by_rows, by_columns = lines(out.shape[-2], out.shape[-1], element.wide)
    if by_rows > by_columns:  # the same with everything turned round
        out, b, a = (v.permuted([*range(len(batch)), len(batch) + 1, len(batch)]) for v in (out, a, b))
    m, k = (f"{n}{next(element.names)}" for n in "mk")
    target, source = _row(element, out), _row(element, b)
    builtin = _MULTIPLY_ADD.get((out.type, a.type, b.type))
    factor = a.at([*batch, m, k])
    with element.inner(f"for (@range(i16, {out.shape[-2]})) |{m}|"):
        if builtin and target and source and not a.literal:
            into = _at(target, out, [*batch, m])
            loop = f"for (@range(i16, {a.shape[-1]})) |{k}|"
            _row_added(element, builtin, into, (source, b, [*batch, k]), loop, factor)
            return
        with (
            element.inner(f"for (@range(i16, {a.shape[-1]})) |{k}|"),
            element.inner(f"for (@range(i16, {out.shape[-1]})) |n|"),
        ):
            element.say(f"{out.at([*batch, m, 'n'])} += {factor} * {b.at([*batch, k, 'n'])};")


def _row_added(
    element: Element, builtin: str, into: str, source: tuple[str, View, list[str]], loop: str, factor: str
) -> None:
    """Add all multiples to a row, which stays in registers; so do rows that lie one after another."""
    text, x, names = source
    walks = x.strides[-2] == x.shape[-1] * x.strides[-1]
    names_of = (("dest", "sum_to_"), ("src0", "sum_of_"), ("src1", "row_"))
    to, at, row = (element.constant(f"@get_dsr(dsr_{kind}, 1)", name) for kind, name in names_of)
    for register in (to, at):
        element.say(f"@load_to_dsr({register}, {into}, .{{ .save_address = false }});")
    if walks:
        first = _at(text, x, names[:-1]) if names[:-1] else text
        element.say(f"@load_to_dsr({row}, {first}, .{{ .save_address = true }});")
    with element.inner(loop):
        element.say(f"{builtin}({to}, {at}, {row if walks else _at(text, x, names)}, {factor});")


def _outer(element: Element, out: View, a: View, b: View, batch: list[str]) -> bool:
    """All products of a column and a row at a time."""
    shape, k = out.shape[-2:], f"k{next(element.names)}"
    made = element.room(shape, "f32")
    column = replace(a, shape=shape, strides=(a.strides[-2], 0))
    row = replace(b, shape=shape, strides=(0, b.strides[-1]))
    total = replace(out, shape=shape, strides=out.strides[-2:])
    parts = [element.described(v, shape) for v in (made, column, row)]
    sizes, (flat, into) = merged([made, total])
    sums = [element.described(v, sizes) for v in (flat, into)]
    steps = [a.strides[-1], b.strides[-2]]
    with element.inner(f"for (@range(i16, {a.shape[-1]})) |{k}|"):
        places = [
            _moved(p, [v.strides[: len(batch)], batch], _times(k, s))
            for p, v, s in zip(parts[1:], (a, b), steps, strict=True)
        ]
        element.say(f"@fmuls({parts[0]}, {places[0]}, {places[1]});")
        target = _moved(sums[1], [out.strides[: len(batch)], batch], "")
        element.say(f"@fadds({target}, {target}, {sums[0]});")
    element.release(made)
    return True


def _inner(element: Element, out: View, a: View, b: View, batch: list[str]) -> bool:
    """An element of the result at a time."""
    summed, (m, n) = a.shape[-1], (f"{name}{next(element.names)}" for name in "mn")
    left, right = (replace(v, shape=(summed,), strides=(s,)) for v, s in ((a, a.strides[-1]), (b, b.strides[-2])))
    if max(abs(v.strides[0]) for v in (left, right)) > LONGEST_STRIDE:
        return False
    made = element.room((summed,), "f32")
    parts = [element.described(v, (summed,)) for v in (made, left, right)]
    cell = element.described(replace(out, shape=(summed,), strides=(0,)), (summed,))
    rows, columns = out.shape[-2:]
    with element.inner(f"for (@range(i16, {rows})) |{m}|"), element.inner(f"for (@range(i16, {columns})) |{n}|"):
        one = _moved(parts[1], [a.strides[: len(batch)], batch], _times(m, a.strides[-2]))
        other = _moved(parts[2], [b.strides[: len(batch)], batch], _times(n, b.strides[-1]))
        element.say(f"@fmuls({parts[0]}, {one}, {other});")
        element.say(f"const into = {_at(cell, out, [*batch, m, n])};")
        element.say(f"@fadds(into, into, {parts[0]});")
    element.release(made)
    return True


WAYS = {OUTER: _outer, INNER: _inner}
# Multiply-adds with a scalar, by the types of the sum and its factors.
_MULTIPLY_ADD = {("f32", "f32", "f32"): "@fmacs", ("f32", "f16", "f16"): "@fmachs"}


def _at(text: str | None, x: View, names: list[str]) -> str:
    """A descriptor moved to where names, one for each of the first axes, say."""
    return f"@increment_dsd_offset({text}, {_offset(x, names)}, {x.type})"


def _moved(text: str | None, batch: Any, first: str) -> str:
    """A descriptor moved by a text, and by the place in a batch."""
    terms = [_times(n, s) for s, n in zip(*batch, strict=True) if s]
    terms += [first] if first else []
    return f"@increment_dsd_offset({text}, {' + '.join(terms)}, f32)" if terms else str(text)


def _row(element: Element, x: View) -> str | None:
    """The descriptor of the first row of a matrix."""
    if x.literal or not -128 < x.strides[-1] < 128:
        return None
    return element.described(replace(x, shape=(x.shape[-1],), strides=(x.strides[-1],)), (x.shape[-1],))


def _offset(x: View, names: list[str]) -> str:
    return " + ".join(_times(n, s) for n, s in zip(names, x.strides, strict=False) if s) or "0"


def _times(name: str, stride: int) -> str:
    return name if stride == 1 else f"{name} * {stride}"
