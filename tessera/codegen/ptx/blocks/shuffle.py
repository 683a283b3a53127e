"""Elements handed between the threads of a warp through registers."""

from __future__ import annotations

from tessera.codegen.ptx.scalars.words import in_register
from tessera.codegen.ptx.text import Text
from tessera.codegen.ptx.types import BITS, register_class
from tessera.types import DType

EVERYONE = "0xFFFFFFFF"


def shuffled(text: Text, dtype: DType, x: str, mode: str, lane: int | str, members: str = EVERYONE) -> str:
    """What another thread of the warp holds as `x`."""
    kind = register_class(dtype)
    if kind == "pred":
        bit = _moved(text, text.let("selp.b32", "b32", 1, 0, x), mode, lane, members)
        return text.let("setp.ne.u32", "pred", bit, 0)
    x = in_register(text, kind, x)
    if BITS[kind] == 32:
        bits = text.let("mov.b32", "b32", x) if kind == "f32" else x
        moved = _moved(text, bits, mode, lane, members)
        return text.let("mov.b32", "f32", moved) if kind == "f32" else moved
    low, high = text.new("b32"), text.new("b32")
    text.do("mov.b64", f"{{{low}, {high}}}", x)
    parts = [_moved(text, each, mode, lane, members) for each in (low, high)]
    return text.let("mov.b64", kind, f"{{{', '.join(parts)}}}")


def _moved(text: Text, x: str, mode: str, lane: int | str, members: str) -> str:
    return text.let(f"shfl.sync.{mode}.b32", "b32", x, lane, 31, members)
