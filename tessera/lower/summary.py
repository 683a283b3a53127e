"""A summary of what a program became: each kernel's dims and ops."""

from __future__ import annotations

from tessera.ir.core import Module
from tessera.lower.naming import label, ops_of
from tessera.op import Rules
from tessera.ops import host, schedule

Row = tuple[str, tuple[str, ...], tuple[str, ...]]
_row = Rules("summary")


def kernels(module: Module) -> list[Row]:
    """Name, dims and ops of each kernel of a Schedule module; a launched tile function has no ops here."""
    nodes = [n for n in module.main.body.walk() if n.op in _row]
    return [_row.of(n.op)(number, n) for number, n in enumerate(nodes)]


@_row(schedule.kernel)
def _(number, node):
    tile, loop = node.attrs["schedule"]["tile"], node.attrs["schedule"]["loop"]
    every = enumerate(zip(node.attrs["dims"], tile, strict=True))
    dims = tuple(f"{name}={n}/{t}{' loop' if d in loop else ''}" for d, ((name, n, _), t) in every)
    (block,) = node.regions
    return f"k{number}_{label(block)}", dims, tuple(ops_of(block))


@_row(host.launch)
def _(number, node):
    return node.attrs["kernel"], tuple(f"grid={n}" for n in node.attrs["grid"]), ()


def show(module: Module) -> str:
    """The summary as text."""
    return "\n".join(f"{name:28} {' '.join(dims):44} {' '.join(ops)}" for name, dims, ops in kernels(module))
