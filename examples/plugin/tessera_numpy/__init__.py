"""A code generator in one file: it emits Python source that calls NumPy, one program of the grid at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tessera.codegen.artifact import Artifact
from tessera.codegen.contract import Capabilities, check_default_policy, check_element_types, check_resources
from tessera.codegen.coverage import OpCoverage, make_refusal_error
from tessera.core.errors import UnsupportedOpError
from tessera.core.types import DTYPES, RefType
from tessera.ir.core import Block, Function, Module, Node, Value
from tessera.ir.rules import Rules
from tessera.ops.dialects import control_flow, host, tile
from tessera.ops.tensor import basic, contractions, elementwise, reduce, shape

emit = Rules("numpy emission")
# The ops that this target does not have, with the reasons that its errors state.
REFUSED = dict.fromkeys((tile.line, tile.pause), "stepping through source lines needs the interpreter")
# The head of every program. `edge="clip"` drops the accesses outside the memory, as does a mask that is false.
PREAMBLE = '''import itertools
import ml_dtypes
import numpy as np


def _locate(ref, starts, shape, edge, mask):
    """The indices of a block along each axis, and which of its elements are accessed."""
    index = np.ix_(*(range(s, s + n) for s, n in zip(starts, shape)))
    inside = np.ones(shape, bool)
    for i, n in zip(index, ref.shape):
        inside = inside & (i >= 0) & (i < n)
    if edge == "error" and (mask & ~inside).any():
        raise IndexError("a block reaches outside its memory")
    return tuple(i.clip(0, n - 1) for i, n in zip(index, ref.shape)), inside & mask


def _load(ref, starts, shape, edge, mask=True, other=0):
    index, accessed = _locate(ref, starts, shape, edge, mask)
    return np.where(accessed, ref[index] if ref.size else other, other).astype(ref.dtype)


def _store(ref, value, starts, edge, mask=True):
    index, accessed = _locate(ref, starts, value.shape, edge, mask)
    places = [i[accessed] for i in np.broadcast_arrays(*index)]
    ref[tuple(places) if places else ...] = value[accessed] if places else np.where(accessed, value, ref)
'''
UFUNCS = {
    "add": "add", "sub": "subtract", "mul": "multiply", "div": "divide", "maximum": "maximum", "minimum": "minimum",
    "neg": "negative", "abs": "abs", "exp": "exp", "log": "log", "sqrt": "sqrt", "tanh": "tanh", "less": "less",
    "less_equal": "less_equal", "greater": "greater", "greater_equal": "greater_equal", "equal": "equal",
    "not_equal": "not_equal", "where": "where", "bitwise_and": "bitwise_and", "bitwise_or": "bitwise_or",
    "floor_divide": "floor_divide", "remainder": "remainder",
}  # fmt: skip


def dtype(value: Any) -> str:
    """The NumPy name of an element type."""
    name = value.numpy.name
    return f"ml_dtypes.{name}" if hasattr(ml_dtypes, name) else f"np.{name}" + ("_" if name == "bool" else "")


class Names(dict):
    """The names of values, numbered in order."""

    def __missing__(self, value: Value) -> str:
        self[value] = f"v{len(self)}"
        return self[value]


@emit(*(getattr(elementwise, name) for name in UFUNCS))
def _(node: Node, names: Names, *args: str) -> Iterator[str]:
    wide = [
        a if v.type.compute == v.type.dtype else f"{a}.astype(np.float32)" for a, v in zip(args, node.args, strict=True)
    ]
    yield f"{names[node.out]} = np.{UFUNCS[node.op.__name__]}({', '.join(wide)}).astype({dtype(node.out.type.dtype)})"


@emit(reduce.sum, reduce.max, reduce.min)
def _(node, names, x):
    a = node.attrs
    wide = (
        f", dtype={dtype(node.args[0].type.accumulate)}"
        if node.op is reduce.sum and node.args[0].type.dtype.is_float
        else ""
    )
    call = f"np.{node.op.__name__}({x}, axis={a['axis']}, keepdims={a['keepdims']}{wide})"
    yield f"{names[node.out]} = {call}.astype({dtype(node.out.type.dtype)})"


@emit(contractions.dot)
def _(node, names, a, b):
    wide = dtype(node.args[0].type.accumulate)
    yield f"{names[node.out]} = ({a}.astype({wide}) @ {b}.astype({wide})).astype({dtype(node.attrs['dtype'])})"


@emit(basic.full)
def _(node, names):
    value = f"float('{node.attrs['value']}')" if node.attrs["dtype"].is_float else repr(node.attrs["value"])
    yield f"{names[node.out]} = np.full({node.attrs['shape']}, {value}, {dtype(node.attrs['dtype'])})"


@emit(basic.cast)
def _(node, names, x):
    to = node.out.type.dtype  # the attribute may be a policy
    if not to.is_float and node.args[0].type.dtype.is_float:
        raise UnsupportedOpError("ts.cast from float to integer cannot be emitted for numpy", location=node.loc)
    yield f"{names[node.out]} = {x}.astype({dtype(to)})"


@emit(basic.broadcast_to)
def _(node, names, x):
    yield f"{names[node.out]} = np.broadcast_to({x}, {node.attrs['shape']})"


@emit(shape.reshape)
def _(node, names, x):
    yield f"{names[node.out]} = np.reshape({x}, {node.attrs['shape']})"


@emit(shape.permute)
def _(node, names, x):
    yield f"{names[node.out]} = np.transpose({x}, {node.attrs['axes']})"


@emit(shape.iota)
def _(node, names):
    a = node.attrs
    along = [1] * len(a["shape"])
    along[a["axis"]] = a["shape"][a["axis"]]
    line = f"np.arange({a['shape'][a['axis']]}, dtype={dtype(a['dtype'])}).reshape({tuple(along)})"
    yield f"{names[node.out]} = np.broadcast_to({line}, {a['shape']})"


@emit(tile.program_id, tile.grid_size)
def _(node, names):
    source = "pid" if node.op is tile.program_id else "grid"
    yield f"{names[node.out]} = np.int64((*{source}, {int(node.op is tile.grid_size)}, 0, 0)[{node.attrs['axis']}])"


def access(node: Node, rest: Sequence[str]) -> tuple[str, str]:
    """The starts of a block that is loaded or stored, and its edge, mask and other value."""
    rank = len(node.args[0].type.shape)
    named = (f", {k}={v}" for k, v in zip(("mask", "other"), rest[rank:], strict=False))
    return f"({''.join(f'{start}, ' for start in rest[:rank])})", repr(node.attrs["edge"]) + "".join(named)


@emit(tile.load)
def _(node, names, ref, *rest):
    starts, options = access(node, rest)
    yield f"{names[node.out]} = _load({ref}, {starts}, {tuple(node.attrs['shape'])}, {options})"


@emit(tile.store)
def _(node, names, ref, value, *rest):
    starts, options = access(node, rest)
    yield f"_store({ref}, {value}, {starts}, {options})"


@emit(control_flow.for_)
def _(node, names, lower, upper, step, *carried):
    body = node.regions[0]
    index, *inner = (names[p] for p in body.params)
    yield from (f"{names[r]} = {p} = {c}" for r, p, c in zip(node.results, inner, carried, strict=True))
    yield f"for {index} in range({lower}, {upper}, {step}):"
    yield from ("    " + line for line in lines(body, names))
    yield from (f"    {names[r]} = {p} = {names[v]}" for r, p, v in zip(node.results, inner, body.results, strict=True))
    yield "    pass"


@emit(host.alloc)
def _(node, names):
    yield f"{names[node.out]} = np.zeros({node.attrs['shape']}, {dtype(node.out.type.dtype)})"


@emit(host.view)
def _(node, names, ref):
    yield f"{names[node.out]} = {ref}.reshape({node.attrs['shape']})"


@emit(host.launch)
def _(node, names, *args):
    grid = node.attrs["grid"]
    yield f"for pid in itertools.product(*map(range, {grid})):"
    yield f"    {node.attrs['kernel']}(pid, {grid}, {', '.join(args)})"


def lines(block: Block, names: Names) -> Iterator[str]:
    """The statements of a block."""
    for node in block.nodes:
        row = emit.get(node.op)
        if row is None:
            raise make_refusal_error("numpy", node, REFUSED)
        check_default_policy(node, "numpy")
        yield from row(node, names, *(names[v] for v in node.args))


def function(item: Function, head: str) -> str:
    """One function's source."""
    names = Names()
    params = ", ".join(names[p] for p in item.params)
    body = "".join(f"    {line}\n" for line in lines(item.body, names))
    return f"\n\ndef {item.name}({head}{params}):\n{body}    return\n"


class Backend:
    """The generator: Python text out of a Tile module, run by `exec`."""

    name = "numpy"
    capabilities = Capabilities(vector_bytes=64, dtypes=DTYPES, max_group=1)
    coverage = OpCoverage((emit,), REFUSED)

    def emit(self, module: Module, options: Mapping[str, Any]) -> Artifact:
        """The module as one Python file.

        Raises:
            UnsupportedOpError: an op has no row, or an element type or policy is not supported.
            ResourceError: a kernel has groups of tiles.
        """
        check_element_types(module, self.name, self.capabilities.dtypes)
        check_resources(module, self.name, self.capabilities)
        kernels = "".join(function(f, "pid, grid, ") for f in module.functions[1:])
        outputs = int(module.main.attrs.get("outputs", 0))
        params = [p.type for p in module.main.params if isinstance(p.type, RefType)]
        made = [[list(t.shape), t.dtype.name] for t in params[len(params) - outputs :]] if outputs else []
        text = PREAMBLE + kernels + function(module.main, "")
        return Artifact({"target": self.name, "entry": module.main.name, "outputs": made}, {"program.py": text})

    def runtime(self, artifact: Artifact) -> SimpleNamespace:
        """What runs the file."""
        scope: dict[str, Any] = {}
        exec(compile(artifact.text("program.py"), "program.py", "exec"), scope)  # noqa: S102
        made = [(tuple(s), next(t.numpy for t in DTYPES if t.name == n)) for s, n in artifact.manifest["outputs"]]

        def run(arrays: Sequence[Any]) -> list[np.ndarray]:
            outputs = [np.zeros(*m) for m in made]
            with np.errstate(all="ignore"):
                scope[artifact.manifest["entry"]](*arrays, *outputs)
            return outputs

        return SimpleNamespace(run=run)


BACKEND = Backend()
