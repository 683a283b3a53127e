"""Where along an axis of a block the largest or least element is."""

from __future__ import annotations

from tessera.codegen.csl.blocks import emit
from tessera.codegen.csl.element import unsupported
from tessera.codegen.csl.memory import each
from tessera.codegen.csl.views import View
from tessera.codegen.small_floats import FORMS
from tessera.ops import reduce

BETTER = {reduce.argmax: ">", reduce.argmin: "<"}


@emit(*BETTER)
def _(element, node, x):
    if node.types[0].dtype in FORMS:
        raise unsupported(node, f"an element does not order codes of {node.types[0].dtype}; cast to f32 first")
    axis, out = node.attrs["axis"] % len(x.shape), element.fresh(node.out.type)
    kept = tuple(n for a, n in enumerate(x.shape) if a != axis)
    level = View(out.type, kept, out.buffer, out.offset, _strides(out, axis, bool(node.attrs["keepdims"])))
    best, place, step = (f"{name}{next(element.names)}" for name in ("best", "place", "step"))
    beats = BETTER[node.op]
    with each(element, kept) as names:
        first, here = (x.at([*names[:axis], at, *names[axis:]]) for at in ("0", step))
        element.say(f"var {best}: {x.type} = {first};")
        element.say(f"var {place}: i16 = 0;")
        with element.inner(f"for (@range(i16, {x.shape[axis]})) |{step}|"):
            condition = f"{here} {beats} {best}"
            if node.types[0].dtype.is_float:  # the first NaN stays
                condition = f"{best} == {best} and ({condition} or {here} != {here})"
            element.say(f"if ({condition}) {{ {best} = {here}; {place} = {step}; }}")
        element.say(f"{level.at(names)} = @as({out.type}, {place});")
    return out


def _strides(out: View, axis: int, kept: bool) -> tuple[int, ...]:
    """The strides of the axes that are left."""
    return tuple(s for a, s in enumerate(out.strides) if not kept or a != axis)
