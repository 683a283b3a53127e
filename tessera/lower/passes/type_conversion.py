"""Type conversion: a function with the type of each value, and perhaps each attribute, replaced; symbolic sizes
replaced by numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.core.errors import ShapeError
from tessera.core.shapes import SizeConstraint, bind_program_sizes
from tessera.core.types import Type
from tessera.ir.core import Attrs, Block, Function, Module, Node, Value, evaluate_attribute


def convert_types(
    function: Function, type_of: Callable[[Type], Type], known: Callable[[Any], Any] = lambda value: value
) -> Function:
    """Convert the type of each value by `type_of`, and each attribute by `known`."""
    return replace(function, body=_convert_block(function.body, type_of, known, {}))


def _convert_block(block: Block, type_of: Any, known: Any, names: dict[Value, Value]) -> Block:
    params = tuple(_convert_value(v, type_of, names) for v in block.params)
    nodes = tuple(_convert_node(n, type_of, known, names) for n in block.nodes)
    return Block(params, nodes, tuple(names[v] for v in block.results))


def _convert_value(value: Value, type_of: Any, names: dict[Value, Value]) -> Value:
    names[value] = Value(type_of(value.type), value.hint)
    return names[value]


def _convert_node(node: Node, type_of: Any, known: Any, names: dict[Value, Value]) -> Node:
    regions = tuple(_convert_block(r, type_of, known, names) for r in node.regions)
    args = tuple(names[v] for v in node.args)
    results = tuple(_convert_value(v, type_of, names) for v in node.results)
    attrs = Attrs({k: known(v) for k, v in node.attrs.items()})
    return replace(node, args=args, attrs=attrs, results=results, regions=regions)


def specialise_shapes(function: Function, sizes: Mapping[str, int]) -> Function:
    """Replace symbolic sizes by the numbers in `sizes`."""
    body = convert_types(function, lambda type: type.evaluate(sizes), lambda value: evaluate_attribute(value, sizes))
    return replace(body, attrs=evaluate_attribute(function.attrs, sizes))


def bind_module_sizes(module: Module, sizes: Mapping[str, int]) -> Module:
    """Replace symbolic sizes by numbers in every function of a module."""
    main, *others = (specialise_shapes(f, sizes) for f in module.functions)
    known = Attrs({k: v for k, v in main.attrs.items() if k not in ("sizes", "constraints")})
    return module.replace(replace(main, attrs=known), *others)


def bind_to_arrays(module: Module, arrays: Sequence[Any]) -> Module:
    """Replace the symbolic sizes of a Schedule or Tile module by those of its arguments.

    Raises:
        ShapeError: as `bind_program_sizes`.
    """
    if "sizes" not in module.main.attrs:
        return module
    inputs = module.main.params[: len(arrays)]
    names = [p.hint or str(i) for i, p in enumerate(inputs)]
    constraints = [SizeConstraint(text) for text in module.main.attrs["constraints"]]
    try:
        sizes = bind_program_sizes(names, [p.type.shape for p in inputs], [np.shape(a) for a in arrays], constraints)
    except ShapeError as error:
        raise error.at(module.main.loc) from None
    return bind_module_sizes(module, sizes)
