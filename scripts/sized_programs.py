"""Programs at sizes at which passes and schedules decide otherwise: few and many rows, long and short ones, odd ones.

Nothing of them runs: what they are lowered to is recorded (`scripts/record_costs.py`), which small cases do not show.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import tessera as ts  # noqa: E402
from tessera.codegen.contract import get_backend  # noqa: E402
from tessera.core.errors import ResourceError, UnsupportedOpError  # noqa: E402
from tessera.core.types import TensorType  # noqa: E402
from tessera.ir.core import Module  # noqa: E402
from tessera.ops.dialects import host  # noqa: E402
from tessera.runtime import driver  # noqa: E402

Shapes = tuple[tuple[int, ...], ...]


def normalise(x: Any, axis: int) -> Any:
    """Elements less their mean, by the root of their variance."""
    rest = x - ts.mean(x, axis=axis, keepdims=True)
    return rest / ts.sqrt(ts.mean(rest * rest, axis=axis, keepdims=True) + 1e-5)


def train(w: Any, x: Any) -> Any:
    """The derivative of a layer's loss."""
    return ts.grad(lambda w: ts.sum(ts.tanh(x @ w) ** 2))(w)


MATRICES = ((64, 1000), (4096, 256), (3, 100000), (16, 4096), (1, 1 << 20), (100000, 3))
PRODUCTS = (
    (1, 512, 4000),
    (4000, 512, 1),
    (8, 4096, 1000),
    (20, 512, 256),
    (256, 64, 256),
    (512, 512, 512),
    (70, 33, 50),
)


def list_pairs(*sizes: tuple[int, int, int]) -> tuple[Shapes, ...]:
    """The operands of products m x k x n."""
    return tuple(((m, k), (k, n)) for m, k, n in sizes)


def repeat(count: int, *shapes: tuple[int, ...]) -> tuple[Shapes, ...]:
    """A number of operands of each shape."""
    return tuple((s,) * count for s in shapes)


# By name: a function, and the shapes of its operands.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Shapes, ...]]] = {
    "pointwise": (lambda x, y: ts.exp(x) * y + 1.0, repeat(2, (7,), (1000, 1000), (3, 5, 7))),
    "row added": (lambda x, y: x + y, (((1000, 300), (300,)), ((300, 1000), (300, 1)))),
    "turned": (lambda x, y: x.T + y, (((300, 500), (500, 300)), ((4, 4096), (4096, 4)))),
    "two sums of one array": (lambda x: (ts.sum(x, axis=1), ts.max(x, axis=1)), repeat(1, *MATRICES[:3])),
    "sum of rows": (partial(ts.sum, axis=1), repeat(1, *MATRICES)),
    "sum of columns": (partial(ts.sum, axis=0), repeat(1, *MATRICES)),
    "sum of all": (lambda x: ts.sum(x * x), repeat(1, *MATRICES[:4])),
    "argmax": (partial(ts.argmax, axis=1), repeat(1, *MATRICES[:3])),
    "norm of rows": (partial(normalise, axis=1), repeat(1, *MATRICES[:5])),
    "norm of columns": (partial(normalise, axis=0), repeat(1, *MATRICES)),
    "softmax of rows": (partial(ts.softmax, axis=1), repeat(1, *MATRICES[:4])),
    "softmax of columns": (partial(ts.softmax, axis=0), repeat(1, *MATRICES)),
    "running sum": (partial(ts.cumsum, axis=1), repeat(1, *MATRICES[:3])),
    "sorted": (partial(ts.sort, axis=1), repeat(1, (7, 9), (3, 3000))),
    "taken rows": (lambda x: ts.take(x, ts.argmax(x, axis=0), axis=0), repeat(1, (64, 100), (4096, 16))),
    "added rows": (lambda x, y: ts.scatter_add(x, ts.argmax(y, axis=1), y), repeat(2, (64, 100), (500, 16))),
    "product": (lambda x, y: x @ y, list_pairs(*PRODUCTS)),
    "product of turned": (lambda x, y: x @ y.T, (((1, 512), (4000, 512)), ((64, 256), (128, 256)), ((512, 512),) * 2)),
    "product and epilogue": (lambda x, y: ts.gelu(x @ y + 1.0), list_pairs(*PRODUCTS[:4])),
    "product kept twice": (lambda x, y: (x @ y, ts.cast(x @ y, dtype=ts.bf16)), list_pairs(*PRODUCTS[2:5])),
    "sum kept twice": (
        lambda x: (ts.sum(x, axis=1), ts.cast(ts.sum(x, axis=1), dtype=ts.bf16)),
        repeat(1, (64, 1000), (4096, 256), (3, 100000)),
    ),
    "softmax of products": (lambda x, y: ts.softmax(x * y, axis=1), repeat(2, (64, 1000), (16, 4096))),
    "product and norm": (lambda x, y: normalise(x @ y, axis=1), list_pairs((64, 256, 128), (20, 512, 256))),
    "two products": (lambda x, y: ts.tanh(x @ y) @ y.T, list_pairs((64, 256, 128), (1, 96, 320))),
    "batch of products": (lambda x, y: x @ y, (((8, 64, 32), (8, 32, 64)), ((8, 1, 64), (8, 64, 100)))),
    "attention": (
        lambda q, k, v: ts.scaled_dot_product_attention(q, k, v, is_causal=True),
        repeat(3, (1, 2, 128, 64), (2, 4, 33, 16)),
    ),
    "attention of bf16": (
        lambda q, k, v: ts.scaled_dot_product_attention(q, k, v),
        repeat(3, (1, 2, 128, 64), (2, 4, 33, 16)),
    ),
    "product of bf16": (lambda x, y: x @ y, list_pairs(*PRODUCTS[2:], (300, 300, 301), (1024, 65, 1025))),
    "concatenation": (
        lambda *parts: ts.concatenate(parts, axis=0),
        tuple(((3, 4),) * count for count in (2, 16, 17, 40)),
    ),
    "windows": (
        lambda x, w: ts.conv2d(x, w, padding=1),
        (((1, 8, 32, 32), (16, 8, 3, 3)), ((4, 3, 9, 9), (4, 3, 3, 3))),
    ),
    "largest of windows": (lambda x: ts.max_pool2d(x, 2), repeat(1, (2, 8, 32, 32), (1, 3, 9, 9))),
    "derivative": (train, (((512, 64), (128, 512)), ((33, 7), (5, 33)))),
}  # fmt: skip
# What is emitted, too, for a machine that need not be this one.
EMITTED: dict[str, dict[str, Any]] = {
    "llvm": {"vector_bytes": 32, "pair_products": False, "byte_products": 1},
    "ptx:sm_90a": {"arch": "sm_90a"},
}
NARROW = (" of bf16",)  # what the names of programs of that type end with
SIZED_TARGETS = {"llvm-choices": "llvm", "ptx-choices": "ptx:sm_90a", "csl-choices": "csl:3x4"}


def count_choices(
    function: Callable[..., Any], shapes: Shapes, target: str, dtype: Any = ts.f32
) -> dict[str, Any] | None:
    """What a program is lowered to: launches, memory, and the ops of its kernels; None if the target refuses it."""
    types = [TensorType(s, dtype) for s in shapes]
    try:
        module = driver.lower(ts.jit(lambda *args: function(*args)).trace(*types).function, target)["tile"]
        emitted = describe_text(module, target) if target in EMITTED else {}
    except (UnsupportedOpError, ResourceError):
        return None
    return {**describe_module(module), **{name: count for name, count in emitted.items() if count}}


def describe_text(module: Module, target: str) -> dict[str, int]:
    """The lines of the text that a Tile module is emitted as; of kernels for a GPU also threads, memory and blocks."""
    artifact = get_backend(target.partition(":")[0]).emit(module, EMITTED[target])
    files = [t for name, t in artifact.files.items() if name.endswith((".ll", ".ptx"))]
    text = "".join(t if isinstance(t, str) else t.decode() for t in files)
    entries = (artifact.manifest["plan"].get("entries") or {}).values()
    counts = {name: sum(entry[name] for entry in entries) for name in ("threads", "shared") if entries}
    counts["resident"] = sum(map(int, re.findall(r"\.minnctapersm (\d+)", text)))
    return {**counts, "lines": len([line for line in text.splitlines() if line.strip()])}


def describe_module(module: Module) -> dict[str, Any]:
    """The launches of a Tile module and its ops: loops, loads and stores with their elements, products."""
    launches = [n for n in module.main.body.walk() if n.op is host.launch]
    nodes = [n for f in module.functions[1:] for n in f.body.walk()]
    moved = [n for n in nodes if {"read", "write"} & {*n.op.effects}]
    elements = sum(math.prod(v.type.shape) for n in moved for v in (*n.results, *n.args[1:2]))
    kinds = Counter(re.sub(r".*\.", "", n.op.name) for n in nodes)
    counts = {"nodes": len(nodes), "loops": kinds["for"], "accesses": len(moved), "elements": elements}
    counts |= {"products": kinds["dot"], "workspace": module.main.attrs.get("workspace", 0)}
    return {"grids": [list(n.attrs["grid"]) for n in launches], **{k: c for k, c in counts.items() if c}}


def list_choices(name: str, kind: str) -> Iterator[tuple[str, dict[str, Any] | None]]:
    """What a program is lowered to at each of its sizes, for a target."""
    (function, sizes), dtype = PROGRAMS[name], ts.bf16 if name.endswith(NARROW) else ts.f32
    for shapes in sizes:
        said = " ".join("x".join(map(str, s)) for s in shapes[:3]) + (f" of {len(shapes)}" if len(shapes) > 3 else "")
        yield f"sized/{name}/{said} {kind}", count_choices(function, shapes, SIZED_TARGETS[kind], dtype)
