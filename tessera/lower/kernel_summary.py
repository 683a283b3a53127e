"""Kernel names and summary: each kernel's name, dims and ops."""

from __future__ import annotations

from collections.abc import Collection

from tessera.ir.core import Block, Module, Node
from tessera.ir.rules import Rules
from tessera.ops.dialects import host, schedule

# Names of kernels, by the ops that they compute.


# The first rows whose ops all occur give the name; each op counts for one row.
KERNEL_PATTERNS: tuple[tuple[frozenset[str], str], ...] = tuple(
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
# Arithmetic is not named after another op.
_ARITHMETIC = frozenset(("add", "sub", "mul", "div", "where"))


def list_ops(block: Block) -> list[str]:
    """The ops of a body in order, without index arithmetic and constants."""
    names = []
    for node in block.nodes:
        if node.op in (schedule.index, schedule.load, schedule.store) or _is_index_arithmetic(node):
            continue
        names.append(node.attrs["kind"] if node.op is schedule.reduce else node.op.__name__)
    return names


def _is_index_arithmetic(node: Node) -> bool:
    return all(v.type.dtype.name in ("int64", "bool") for v in (*node.args, *node.results)) or not node.args


def name_kernel(block: Block) -> str:
    """A short name for a body."""
    return "_".join(_join_op_names(frozenset(list_ops(block)))) or "copy"


def _join_op_names(ops: Collection[str]) -> list[str]:
    found: list[str] = []
    left = set(ops)
    for pattern, name in KERNEL_PATTERNS:
        if pattern <= left and not (found and pattern <= _ARITHMETIC):
            found.append(name)
            left -= pattern
    return found or sorted(left)[:1]


KernelRow = tuple[str, tuple[str, ...], tuple[str, ...]]
_summary_rules = Rules("summary")


def summarise_kernels(module: Module) -> list[KernelRow]:
    """Name, dims and ops of each kernel of a Schedule module; a launch of a tile function has no ops."""
    nodes = [n for n in module.main.body.walk() if n.op in _summary_rules]
    return [_summary_rules.of(n.op)(number, n) for number, n in enumerate(nodes)]


@_summary_rules(schedule.kernel)
def _(number, node):
    tile, loop = node.attrs["schedule"]["tile"], node.attrs["schedule"]["loop"]
    every = enumerate(zip(node.attrs["dims"], tile, strict=True))
    dims = tuple(f"{name}={n}/{t}{' loop' if d in loop else ''}" for d, ((name, n, _), t) in every)
    (block,) = node.regions
    return f"k{number}_{name_kernel(block)}", dims, tuple(list_ops(block))


@_summary_rules(host.launch)
def _(number, node):
    return node.attrs["kernel"], tuple(f"grid={n}" for n in node.attrs["grid"]), ()


def format_summary(module: Module) -> str:
    """The summary as text."""
    return "\n".join(f"{name:28} {' '.join(dims):44} {' '.join(ops)}" for name, dims, ops in summarise_kernels(module))
