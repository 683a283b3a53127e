"""Small tile functions built by hand, and modules that launch them."""

from contextlib import contextmanager

from tessera.core.types import RefType, as_dtype, int64
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Value
from tessera.ir.tensor import Tensor
from tessera.ops.dialects import control_flow, host, tile
from tessera.ops.tensor import basic


class Kernel:
    """A tile function under construction: parameters by name, values as Tensors."""

    def __init__(self, group=1, **refs):
        self.builder, self.group = Builder(), group
        self.refs = {k: Value(RefType(shape, as_dtype(dtype)), k) for k, (shape, dtype) in refs.items()}

    def op(self, op, *args, **attrs):
        values = [a.data if isinstance(a, Tensor) else a for a in args]
        node = self.builder.add(op, values, attrs)
        return Tensor(node.out) if node.results and not _is_ref(node) else _value(node)

    def index(self, value):
        return self.op(basic.full, shape=(), value=value, dtype=int64)

    def load(self, name, *starts, shape, edge="error", rest=()):
        return self.op(tile.load, self._ref(name), *self._starts(starts), *rest, shape=shape, edge=edge)

    def store(self, name, value, *starts, edge="error", rest=()):
        self.op(tile.store, self._ref(name), value, *self._starts(starts), *rest, edge=edge)

    def _ref(self, name):
        return self.refs[name] if isinstance(name, str) else name

    def _starts(self, starts):
        return [self.index(s) if isinstance(s, int) else s for s in starts]

    def region(self, params, body):
        values = [Value(t) for t in params]
        with self.builder.region() as nodes:
            results = body(*(Tensor(v) for v in values))
        return Block(tuple(values), tuple(nodes), tuple(t.data for t in results))

    def repeat(self, lower, upper, carried, body):
        region = self.region([lower.type, *(c.type for c in carried)], body)
        args = [lower.data, upper.data, self.index(1).data, *(c.data for c in carried)]
        node = self.builder.add(control_flow.for_, args, {}, types=tuple(c.type for c in carried), regions=(region,))
        return [Tensor(v) for v in node.results]

    def choose(self, condition, then, other):
        regions = (self.region([], then), self.region([], other))
        types = tuple(v.type for v in regions[0].results)
        node = self.builder.add(control_flow.if_, [condition.data], {}, types=types, regions=regions)
        return [Tensor(v) for v in node.results]

    def module(self, *grid):
        params = tuple(self.refs.values())
        body = Function("k", self.builder.block(params, ()), Attrs({"group": self.group}))
        main, arguments = Builder(), tuple(Value(p.type, p.hint) for p in params)
        main.add(host.launch, arguments, {"kernel": "k", "grid": grid})
        return Module("tile", (Function("main", main.block(arguments, ()), Attrs({"outputs": 0})), body))


def _is_ref(node):
    return isinstance(node.out.type, RefType)


def _value(node):
    return node.out if node.results else None


@contextmanager
def kernel(group=1, **refs):
    """A Kernel whose builder records what ops are called on its values."""
    made = Kernel(group, **refs)
    with made.builder.active():
        yield made
