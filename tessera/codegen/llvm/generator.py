"""The LLVM generator's compiler: Tile modules to LLVM IR with a host plan, after the propagation of reshapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import tessera.codegen.llvm.text.kernel_emitter  # noqa: F401
from tessera.codegen.artifact import Artifact, build_manifest, hash_json, split_parameters
from tessera.codegen.contract import (
    Capabilities,
    CompilerPass,
    check_element_types,
    check_resources,
    run_passes,
    static_shape,
)
from tessera.codegen.coverage import OpCoverage
from tessera.codegen.grouped.vectoriser import LEVEL, vectorise, vectorise_groups
from tessera.codegen.llvm.runtime.jit import has_products
from tessera.codegen.llvm.runtime.program import TEXT_FILE
from tessera.codegen.llvm.table import REFUSED
from tessera.codegen.llvm.table.emission import pointwise_row, statement_rule
from tessera.codegen.llvm.table.loop_fusion import element_rule
from tessera.codegen.llvm.text.kernel_emitter import LlvmOptions, emit_module
from tessera.codegen.llvm.text.pair_products import BF16, INT16, QUADS
from tessera.codegen.llvm.text.protocol import PLAN_SEAL
from tessera.core.errors import ArgumentError
from tessera.ir.core import Module, Node, Value
from tessera.ir.rewrite import RewritePatterns, Rewriter, rewrite_function
from tessera.ir.rules import REGISTRY
from tessera.ops.tensor import basic, reduce, shape

OPTION_NAMES = ("vector_bytes", "pair_products", "byte_products", "debug", "schedule")
COVERAGE = OpCoverage((pointwise_row, element_rule, statement_rule), REFUSED, (vectorise,))


def seal_plan(text: str, plan: Mapping[str, Any]) -> str:
    """The text with a last line that names its plan: the two run together, or not at all."""
    return f"{text.rstrip()}\n{PLAN_SEAL}{hash_json(plan)}\n"


def emit(name: str, capabilities: Capabilities, module: Module, options: Mapping[str, Any]) -> Artifact:
    """The LLVM text of a Tile module: see `LlvmBackend.emit`."""
    unknown = [k for k in options if k not in OPTION_NAMES]
    if unknown:
        raise ArgumentError(f"the target llvm has no option {unknown[0]}", expected=", ".join(OPTION_NAMES))
    if module.level != LEVEL:
        check_element_types(module, name, capabilities.dtypes)
        check_resources(module, name, capabilities)
    vector = int(options.get("vector_bytes", capabilities.vector_bytes))
    ready = run_passes(list_passes(module), module)
    native = vector == capabilities.vector_bytes
    pairs = bool(options.get("pair_products", native and has_products((BF16,))))
    bytes_ = int(options.get("byte_products", _count_byte_products() if native else 1))
    emission = emit_module(ready, LlvmOptions(vector, bool(options.get("debug", True)), pairs, bytes_))
    text = seal_plan(emission.text, emission.plan)
    described = build_manifest(
        name, module, emission.plan, text, split_parameters(emission.plan),
        {"vector_bytes": vector, "pair_products": pairs, "byte_products": bytes_},
        options.get("schedule"), ("llvmlite",),
    )  # fmt: skip
    return Artifact(described, {TEXT_FILE: text})


def _count_byte_products() -> int:
    """How many products of bytes this processor adds to a lane at a time."""
    return 4 if has_products(QUADS) else 2 if has_products((INT16,)) else 1


def list_passes(module: Module) -> tuple[CompilerPass, ...]:
    """The rewrites of a Tile module: fusion and bufferisation are analyses, which emission reads."""
    if module.level == LEVEL:
        return ()
    return (
        CompilerPass("reshape propagation", propagate_reshapes),
        CompilerPass("group vectorisation", vectorise_groups),
    )


# Reshape propagation: a reshape that merges axes moves behind the pointwise ops and reductions that read it. Loops then
# run over the axes before the merge, whose indices give those of merged axes by multiplication. The other way round
# each element of an index needs divisions.


Shape = tuple[int, ...]
patterns = RewritePatterns("reshape propagation")
POINTWISE = tuple(o for o in REGISTRY.values() if o.pointwise)


def propagate_reshapes(module: Module) -> Module:
    """Move the reshapes of every tile function that merge axes towards the results."""
    tile_functions = (rewrite_function(f, patterns, remove_dead=True) for f in module.functions[1:])
    return replace(module, functions=(module.functions[0], *tile_functions))


def group_axes(fine: Shape, merged: Shape) -> list[range] | None:
    """For each axis of `merged` the axes of `fine` that it consists of; None where it is no merge of them."""
    groups: list[range] = []
    start = 0
    for n in merged:
        stop, product = start, 1
        while stop < len(fine) and (
            product < n or (fine[stop] == 1 and product == n and len(groups) + 1 == len(merged))
        ):
            product *= fine[stop]
            stop += 1
        if product != n:
            return None
        groups.append(range(start, stop))
        start = stop
    return groups if start == len(fine) else None


def _find_merge(rewriter: Rewriter, value: Value) -> tuple[Value, list[range]] | None:
    """The operand of the reshape that defines a value, and its groups of axes, if it merges axes."""
    node = rewriter.find_producer(value, shape.reshape)
    if node is None:
        return None
    fine, merged = static_shape(node.args[0].type), static_shape(value.type)
    groups = group_axes(fine, merged) if math.prod(fine) > 1 else None
    return (node.args[0], groups) if groups and any(_count_long(fine, g) > 1 for g in groups) else None


def _count_long(sizes: Shape, group: range) -> int:
    return sum(sizes[a] != 1 for a in group)


@patterns(shape.reshape)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    """A reshape of a reshape is one; one to the same shape is none."""
    inner = rewriter.find_producer(args[0], shape.reshape)
    source = args[0] if inner is None else inner.args[0]
    if source.type.shape == node.out.type.shape:  # type: ignore[union-attr]
        return source
    return None if inner is None else rewriter.add(shape.reshape, source, shape=node.out.type.shape)  # type: ignore[union-attr]


@patterns(*POINTWISE)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    """A pointwise op runs over the axes before the merge."""
    found = next((f for a in args if (f := _find_merge(rewriter, a)) is not None), None)
    if found is None:
        return None
    fine = static_shape(found[0].type)
    split = [_split(rewriter, a, fine, found[1]) for a in args]
    types = tuple(v.type.with_shape(fine) for v in node.results)  # type: ignore[union-attr]
    out = rewriter.builder.add(node.op, split, node.attrs, types=types).out
    return rewriter.add(shape.reshape, out, shape=static_shape(node.out.type))


def _split(rewriter: Rewriter, value: Value, fine: Shape, groups: Sequence[range]) -> Value:
    """A value over the axes before a merge."""
    full = rewriter.find_producer(value, basic.full)
    if full is not None:
        return rewriter.add(basic.full, **{**full.attrs, "shape": fine})
    spread = rewriter.find_producer(value, basic.broadcast_to)
    small = None if spread is None else _split_sizes(static_shape(spread.args[0].type), fine, groups)
    if spread is not None and small is not None:
        return rewriter.add(basic.broadcast_to, _reshape(rewriter, spread.args[0], small), shape=fine)
    return _reshape(rewriter, value, fine)


def _reshape(rewriter: Rewriter, value: Value, to: Shape) -> Value:
    inner = rewriter.find_producer(value, shape.reshape)
    value = value if inner is None else inner.args[0]
    return value if static_shape(value.type) == to else rewriter.add(shape.reshape, value, shape=to)


def _split_sizes(sizes: Shape, fine: Shape, groups: Sequence[range]) -> Shape | None:
    """The sizes before a merge of what was broadcast to the merged axes: all or one of each group."""
    found: list[int] = []
    for n, group in zip((1,) * (len(groups) - len(sizes)) + sizes, groups, strict=True):
        whole = [fine[a] for a in group]
        if n not in (1, math.prod(whole)):
            return None
        found += whole if n == math.prod(whole) else [1] * len(whole)
    return tuple(found)


@patterns(reduce.sum, reduce.max, reduce.min)
def _(rewriter: Rewriter, node: Node, args: list[Value]) -> Value | None:
    """A reduction of a merged axis reduces each of the axes that it consists of."""
    found = _find_merge(rewriter, args[0])
    if found is None or node.attrs["keepdims"]:
        return None
    (x, groups), rank = found, len(static_shape(args[0].type))
    reduced = {a % rank for a in node.attrs["axis"]}
    if not any(_count_long(static_shape(x.type), groups[a]) > 1 for a in reduced):
        return None
    axes = tuple(a - len(static_shape(x.type)) for r in sorted(reduced) for a in groups[r])
    kept = tuple(n for a, n in enumerate(static_shape(x.type)) if a - len(static_shape(x.type)) not in axes)
    type = node.out.type.with_shape(kept)  # type: ignore[union-attr]
    out = rewriter.builder.add(node.op, [x], {**node.attrs, "axis": axes}, types=(type,)).out
    return _reshape(rewriter, out, static_shape(node.out.type))
