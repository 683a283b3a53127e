"""Descriptions of modules: the text of `repr`, and the table of `summary`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from tessera.core.pytree import flatten
from tessera.ir.builder import Builder
from tessera.ir.core import Value
from tessera.ir.tensor import Tensor, as_tensor

if TYPE_CHECKING:
    from tessera.nn.module import Module


def describe_module(module: Module) -> str:
    """The module, its configuration and parts, and the number of its parameters."""
    return _describe(module) + f"  # {_count(module)}"


def _count(module: Module) -> str:
    if any(each.lacks_shapes for each in module.modules()):
        return "parameters after the first call"
    number = module.count_parameters()
    return f"{number:,} parameter" + ("" if number == 1 else "s")


def _describe(module: Module) -> str:
    head = f"{type(module).__name__}({module.extra_repr()}"
    parts = [(name, child) for name, child in module.__dict__["_modules"].items() if child is not None]
    if not parts:
        return f"{head})"
    lines = [f"({name}): {_describe(child)}".replace("\n", "\n  ") for name, child in parts]
    return "\n  ".join([head, *lines]) + "\n)"


def print_summary(module: Module, args: tuple[Any, ...], file: Any) -> None:
    """Print the table of `Module.summary`."""
    shapes = trace_result_shapes(module, args) if args else {}
    table = Table(title=type(module).__name__)
    for title in ("module", "kind", *(("result",) if args else ())):
        table.add_column(title)
    for title in ("parameters", "trained", "bytes"):
        table.add_column(title, justify="right")
    for path, each in module.named_modules():
        own = [t for t in each.__dict__["_parameters"].values() if t is not None]
        if path and not own and each.children():
            continue
        tensors = own if each.children() and path else each.parameters()
        trained = sum(int(t.size) for t in tensors) - _count_frozen(each, path)
        size = sum(int(t.size) * t.dtype.bits for t in tensors) // 8
        row = [path or "(whole)", type(each).__name__, *((shapes.get(id(each), ""),) if args else ())]
        table.add_row(*row, f"{sum(int(t.size) for t in tensors):,}", f"{trained:,}", f"{size:,}")
    Console(file=file).print(table)


def _count_frozen(module: Module, path: str) -> int:
    each = [module] if path and module.children() else module.modules()
    found = {
        id(m._parameters[n]): m._parameters[n] for m in each for n in m._frozen if m._parameters.get(n) is not None
    }
    return sum(int(t.size) for t in found.values())


def trace_result_shapes(module: Module, args: tuple[Any, ...]) -> dict[int, str]:
    """The types of the results of all modules in a call, by the module's identity; nothing is computed."""
    shapes: dict[int, str] = {}

    def note(each: Module, _: Any, found: Any) -> None:
        shapes[id(each)] = ", ".join(str(t.type) for _, t in flatten(found)[0] if isinstance(t, Tensor))

    kept = {id(m): (m, dict(m.__dict__)) for m in module.modules()}
    for each, _ in kept.values():
        each.register_forward_hook(note)
    builder = Builder()
    try:
        with builder.active():
            for each, _ in kept.values():
                each.__dict__["_trace"] = builder
                each.__dict__["_buffers"] = dict(each.__dict__["_buffers"])
            module(*[Tensor(Value(as_tensor(a).type)) if _is_array(a) else a for a in args])
    finally:
        for each, state in kept.values():
            each.__dict__.clear()
            each.__dict__.update(state)
    return shapes


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")
