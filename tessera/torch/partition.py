"""Partition of an ATen graph: pieces that Tessera compiles, and ops that PyTorch runs, each with the reason.

An op is taken if the op table has it, and if its row on the types of this very call gives the shapes and element types
that PyTorch has found. The pieces are PyTorch's own (`CapabilityBasedPartitioner`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import reduce
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from tessera.core.errors import traceback_location
from tessera.core.symbolic_dim import Dim, Size, UnknownSizeError
from tessera.core.types import TensorType
from tessera.torch.conversion import ASSERTIONS, name_op, supported
from tessera.torch.forms import owns_memory
from tessera.torch.interop import DEVICE_TARGETS
from tessera.torch.rows.matrices import HOST_OPS
from tessera.torch.tensors import DTYPES

PIECE = "tessera_piece_"  # the name of a piece's submodule, with its number
MAX_ANSWERS = 4096  # answers of the table that are kept


# What PyTorch knows of a node.


def get_fake(node: Node) -> Any:
    """What PyTorch knows of a node's result: a fake tensor, a symbolic number, a tuple of them, or None."""
    return node.meta.get("val")


def list_fakes(value: Any) -> list[torch.Tensor]:
    """The fake tensors of a result, or of a list of nodes."""
    if isinstance(value, Node):
        value = get_fake(value)
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for each in value for t in list_fakes(each)] if isinstance(value, (tuple, list)) else []


def is_host_node(node: Node) -> bool:
    """Whether a node computes numbers, such as sizes, and no tensors: Python does that in every call."""
    fake = get_fake(node)
    return isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def hint(size: Any) -> int:
    """A size as the number that it had when PyTorch traced the graph."""
    if isinstance(size, int):
        return size
    found = size.node.hint
    return 0 if found is None else int(found)


def describe_fake(fake: torch.Tensor) -> TensorType:
    """The type of a fake tensor, with the sizes of the trace."""
    return TensorType(tuple(hint(n) for n in fake.shape), DTYPES[fake.dtype])


def to_size(size: Any) -> Size:
    """A size of PyTorch as one of Tessera: a polynomial of names, quotients and remainders.

    Raises:
        UnknownSizeError: it is another expression.
    """
    return size if isinstance(size, int) else _to_size(size.node.expr)


def _to_size(expr: Any) -> Size:
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol:
        return Dim.of(str(expr))
    kind, parts = type(expr).__name__, [_to_size(a) for a in expr.args]
    if kind not in _SIZE_OPERATORS or (kind == "Pow" and not isinstance(parts[1], int)):
        raise UnknownSizeError(f"the size {expr} is no polynomial")
    return reduce(_SIZE_OPERATORS[kind], parts)


_SIZE_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv, "Mod": operator.mod,
    "PythonMod": operator.mod, "CleanDiv": operator.floordiv, "Pow": lambda a, n: reduce(operator.mul, [a] * n),
}  # fmt: skip


# Why an op is not taken.


class Support(OperatorSupportBase):
    """Which nodes of a graph Tessera takes; `reasons` says of all others why not."""

    def __init__(self, device: str | None, refused: Callable[[Node], str | None]) -> None:
        self.device, self.refused = device, refused
        self.reasons: dict[Node, str] = {}
        self._known: dict[Node, bool] = {}

    def is_node_supported(self, submodules: Any, node: Node) -> bool:
        """Whether a node belongs in a piece."""
        if node not in self._known:
            self._known[node] = self._examine(node)
        return self._known[node]

    def _examine(self, node: Node) -> bool:
        if node.op != "call_function" or is_host_node(node) or name_op(node.target) in ASSERTIONS:
            return False  # PyTorch's checks stay PyTorch's
        if node.target is operator.getitem:
            return self.is_node_supported({}, node.args[0])  # type: ignore[arg-type]
        reason = self.refused(node) or find_refusal(node, self.device)
        if reason is not None:
            self.reasons[node] = reason
        return reason is None

    def leave(self, node: Node) -> None:
        """Leave a node that computes nothing to PyTorch, which is no fallback."""
        self._known[node] = False

    def refuse(self, node: Node, reason: str) -> None:
        """Leave a node to PyTorch."""
        self._known[node], self.reasons[node] = False, reason


def find_refusal(node: Node, device: str | None) -> str | None:
    """Why a node is left to PyTorch; None for one that Tessera takes. `device`: the only one whose tensors it takes."""
    tensors = [*list_fakes(node.all_input_nodes), *list_fakes(node)]
    if not list_fakes(node):
        return "it has no tensor as a result"
    for t in tensors:
        if t.layout is not torch.strided:
            return f"a tensor of layout {str(t.layout).removeprefix('torch.')}"
        if t.dtype not in DTYPES:
            return f"a tensor of {str(t.dtype).removeprefix('torch.')}"
        if t.device.type not in DEVICE_TARGETS or device not in (None, t.device.type):
            return f"a tensor on {t.device}"
        if any(getattr(getattr(n, "node", None), "hint", 0) is None for n in t.shape):
            return "a size that depends on data"
    if name_op(node.target) in HOST_OPS:
        return "PyTorch calls LAPACK itself, and reports failures in a result"
    return ask_table(node)


# What the table says of a node, for the sizes of the trace: equal nodes are asked once.

_ANSWERS: dict[Hashable, str | None] = {}


def ask_table(node: Node) -> str | None:
    """Why the table does not take a node; None if it does."""
    key = _make_key(node)
    if key is not None and key in _ANSWERS:
        return _ANSWERS[key]
    try:
        with unset_fake_temporarily():
            found = supported(_with_known_sizes(node))
    except Exception as error:  # a row's mistake on arguments that it does not foresee: PyTorch runs the op
        place = traceback_location(_last(error.__traceback__))
        found = f"its row fails: {type(error).__name__}: {error} ({place})"
    if key is not None:
        if len(_ANSWERS) >= MAX_ANSWERS:
            _ANSWERS.clear()
        _ANSWERS[key] = found
    return found


def _make_key(node: Node) -> Hashable:
    """What the answer depends on; None where that cannot be hashed."""
    used = tuple(u.args[1] for u in node.users if u.target is operator.getitem and u.users)
    try:
        key = (node.target, used, *map(_key_of, (*node.args, *node.kwargs.items(), get_fake(node))))
        hash(key)
    except TypeError:
        return None
    return key


def _key_of(value: Any) -> Hashable:
    if isinstance(value, Node):
        return _key_of(get_fake(value))
    if isinstance(value, torch.Tensor):
        strides = tuple(hint(n) for n in value.stride())
        return ("tensor", tuple(hint(n) for n in value.shape), strides, value.dtype, value._is_view())
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return ("symbolic", hint(value))
    if isinstance(value, (tuple, list)):
        return tuple(map(_key_of, value))
    return (type(value), repr(value) if isinstance(value, float) else value)


def _last(step: Any) -> Any:
    while step.tb_next is not None:
        step = step.tb_next
    return step


def _with_known_sizes(node: Node) -> Node:
    """The node, or a copy in which numbers are in place of symbolic sizes."""
    inputs, users = node.all_input_nodes, list(node.users)
    if not any(_is_symbolic(get_fake(n)) for n in (node, *inputs)):
        return node
    graph = torch.fx.Graph()
    known: dict[Node, Any] = {}
    for i, each in enumerate(inputs):
        if isinstance(get_fake(each), torch.Tensor):
            known[each] = graph.placeholder(f"x{i}")
            known[each].meta["val"] = _set_sizes(get_fake(each))
        else:
            known[each] = hint(get_fake(each))
    arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: known[n])
    copy = graph.call_function(node.target, *arguments)  # type: ignore[arg-type]
    copy.meta["val"] = _set_sizes(get_fake(node))
    items = [
        graph.call_function(u.target, (copy, u.args[1])) for u in users if u.target is operator.getitem and u.users
    ]
    graph.output(items or copy)
    return copy


def _is_symbolic(fake: Any) -> bool:
    if isinstance(fake, torch.Tensor):
        return not all(isinstance(n, int) for n in fake.shape)
    if isinstance(fake, (tuple, list)):
        return any(map(_is_symbolic, fake))
    return isinstance(fake, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _set_sizes(fake: Any) -> Any:
    """What PyTorch knows of a result, with the sizes of the trace."""
    if isinstance(fake, torch.Tensor):
        sizes, strides = [hint(n) for n in fake.shape], [hint(n) for n in fake.stride()]
        return torch.empty_strided(sizes, strides, dtype=fake.dtype, device="meta")
    return [_set_sizes(f) for f in fake] if isinstance(fake, (tuple, list)) else fake


# Results that are views.


def leave_result_views(module: GraphModule, support: Support, inference: bool, hidden: Collection[int] = ()) -> None:
    """Leave views that a graph returns to PyTorch where its caller can see that they are views.

    With symbolic sizes AOTAutograd makes a view of an input or of another result of the caller's tensor, by the strides
    and the offset of the one that the graph returns, so it must be a true view. In inference it makes only those of
    inputs: other results that share memory in eager PyTorch are views of what the graph returns. Results at the places
    `hidden` are not the caller's. Nodes with other users are copied.
    """
    symbolic = any(_is_symbolic(get_fake(n)) for n in module.graph.nodes if n.op == "placeholder")
    if not (symbolic or inference):
        return
    output = next(n for n in module.graph.nodes if n.op == "output")
    seen = [n for i, n in enumerate(output.args[0]) if i not in hidden and isinstance(n, Node)]
    results = list(dict.fromkeys(seen))
    chains = [chain for chain in map(_list_views, results) if chain]
    count = Counter(_get_base(chain) for chain in chains)
    copies: dict[Node, Node] = {}
    for chain in chains:
        base = _get_base(chain)
        shared = base in results or (inference and count[base] > 1)
        if symbolic if base.op == "placeholder" else shared:
            _copy_views(module, output, chain, copies, support)
    output.args = torch.fx.node.map_arg(output.args, lambda n: copies.get(n, n))
    module.graph.eliminate_dead_code()
    module.recompile()


def _get_base(views: Sequence[Node]) -> Node:
    return cast(Node, views[-1].args[0])


def _list_views(node: Node) -> list[Node]:
    """The views that a node is made of, the last one first."""
    chain = []
    while node.op == "call_function" and _makes_view(node) and isinstance(node.args[0], Node):
        chain.append(node)
        node = node.args[0]
    return chain


def _makes_view(node: Node) -> bool:
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and node.args[0].op == "call_function" and _makes_view(node.args[0])
    schema = getattr(node.target, "_schema", None)
    aliases = [] if schema is None else [r.alias_info for r in schema.returns]
    return any(a is not None and not a.is_write for a in aliases)


def _copy_views(
    module: GraphModule, output: Node, chain: Sequence[Node], copies: dict[Node, Node], support: Support
) -> None:
    for node in reversed(chain):
        if node not in copies:
            with module.graph.inserting_before(output):
                copies[node] = module.graph.node_copy(node, lambda n: copies.get(n, n))
            support.leave(copies[node])


# Views by strides.

BY_STRIDES = (torch.ops.aten.as_strided.default, torch.ops.aten.as_strided_copy.default)


def anchor_strided_views(module: GraphModule) -> None:
    """Let views by strides be of what owns the memory, in the order of the memory: a row of the table takes these."""
    for node in list(module.graph.nodes):
        if node.target in BY_STRIDES and isinstance(get_fake(node.args[0]), torch.Tensor):
            _anchor(module, node)
    module.graph.eliminate_dead_code()


def _anchor(module: GraphModule, node: Node) -> None:
    source = cast(Node, node.args[0])
    chain = [source, *(_get_base([v]) for v in _list_views(source))]
    owner = next((n for n in chain if _in_memory_order(get_fake(n)) is not None), None)
    if owner is None or owner.op == "placeholder":
        return
    ordered = _in_memory_order(get_fake(owner))
    size, stride, offset = (*node.args[1:], None)[:3]
    if ordered is not get_fake(owner):
        with module.graph.inserting_before(node):
            owner = module.graph.call_function(torch.ops.aten.permute.default, (owner, _memory_order(get_fake(owner))))
        owner.meta.update({**node.meta, "val": ordered})
    node.args = (owner, size, stride, get_fake(source).storage_offset() if offset is None else offset)


def _in_memory_order(fake: Any) -> torch.Tensor | None:
    """A tensor that has all elements of its memory, each once, with its axes in the order of the memory; else None."""
    if not isinstance(fake, torch.Tensor) or _is_symbolic(fake):
        return None
    ordered = fake if fake.is_contiguous() else fake.permute(_memory_order(fake))
    return ordered if ordered.is_contiguous() and owns_memory(ordered) else None


def _memory_order(fake: torch.Tensor) -> list[int]:
    strides = fake.stride()
    return sorted(range(fake.ndim), key=lambda axis: -strides[axis])


# The pieces.


def partition(module: GraphModule, support: Support) -> tuple[GraphModule, list[str]]:
    """Gather what Tessera takes in submodules, which are named; the graph calls them."""
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output", "get_attr")]
    taken = [n for n in nodes if support.is_node_supported({}, n)]
    if len(taken) == len(nodes):
        groups: list[dict[Node, int | None]] = [dict.fromkeys(nodes)] if nodes else []
    else:
        found = CapabilityBasedPartitioner(module, support, allows_single_node_partition=True)
        groups = [p.nodes for p in found.propose_partitions()]
    if not groups:
        return module, []
    fused = fuse_by_partitions(module, groups, prefix=PIECE, always_return_tuple=True)
    return fused, [f"{PIECE}{i}" for i in range(len(groups))]
