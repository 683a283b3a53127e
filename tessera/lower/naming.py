"""What a kernel is called: by what it computes."""

from __future__ import annotations

from collections.abc import Collection

from tessera.ir.core import Block, Node
from tessera.ops import schedule

# The first row whose ops are all there gives the name; the ops of a row are then spoken for.
PATTERNS: tuple[tuple[frozenset[str], str], ...] = tuple(
    (frozenset(ops.split()), name)
    for ops, name in (
        ("contract", "matmul"),
        ("max exp sum", "softmax"),
        ("sum rsqrt", "normalize"),
        ("argmax", "argmax"),
        ("argmin", "argmin"),
        ("sum", "sum"),
        ("max", "max"),
        ("min", "min"),
        ("erf", "gelu"),
        ("tanh", "tanh"),
        ("exp", "exp"),
        ("log", "log"),
        ("add", "add"),
        ("sub", "sub"),
        ("mul", "mul"),
        ("div", "div"),
        ("where", "where"),
    )
)
# After such a name plain arithmetic is not worth a word.
_PLAIN = frozenset(("add", "sub", "mul", "div", "where"))


def ops_of(block: Block) -> list[str]:
    """The ops of a body in order, without index arithmetic and constants."""
    names = []
    for node in block.nodes:
        if node.op in (schedule.index, schedule.load, schedule.store) or _is_index(node):
            continue
        names.append(node.attrs["kind"] if node.op is schedule.reduce else node.op.__name__)
    return names


def _is_index(node: Node) -> bool:
    return all(v.type.dtype.name in ("int64", "bool") for v in (*node.args, *node.results)) or not node.args


def label(block: Block) -> str:
    """A short name for a body."""
    return "_".join(_words(frozenset(ops_of(block)))) or "copy"


def _words(ops: Collection[str]) -> list[str]:
    found: list[str] = []
    left = set(ops)
    for pattern, name in PATTERNS:
        if pattern <= left and not (found and pattern <= _PLAIN):
            found.append(name)
            left -= pattern
    return found or sorted(left)[:1]
