"""Where collectives of hand-written host programs start and end: each order that memory and messages demand.

A step is a word with the buffer that it reads and the one that it writes: "launch x y", "reduce x y" (over all ranks),
"pairs x y" (over other groups), "send x y", "view x y" (y is x in another shape); or a list, the steps of a branch.
"""

import numpy as np
import pytest
from tilekernels import Kernel

import tessera as ts
from tessera.core.types import RefType, bool_, f32
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Block, Function, Module, Value
from tessera.lower.passes.collective_scheduling import schedule_collectives
from tessera.ops.dialects import host
from tessera.runtime.program import prepare

GROUPS = {"reduce": ((0, 1, 2, 3),), "pairs": ((0, 1), (2, 3))}


class Program:
    """A host program of steps, and its steps after scheduling."""

    def __init__(self, steps, size=4):
        kernel = Kernel(*[np.zeros(size, np.float32)] * 2)
        kernel.store(kernel.params[1], kernel.load(kernel.params[0]))
        self.buffers = {name: Value(RefType((size,), f32)) for name in "abcdefrstxyz"}
        self.flag = Value(RefType((), bool_))
        body = Block((*self.buffers.values(), self.flag), self.build(steps), ())
        functions = Function("main", body, Attrs({"outputs": 0})), kernel.module().functions[1]
        self.main = schedule_collectives(Module("tile", functions)).main
        self.steps = [self.name(n) for n in self.main.body.nodes]

    def build(self, steps):
        made = Builder()
        for step in steps:
            if isinstance(step, list):
                made.add(host.if_, [self.flag], {}, regions=(Block((), self.build(step), ()), Block((), (), ())))
                continue
            op, *names = step.split()
            x, y = (self.buffers[name] for name in names)
            if op == "view":
                self.buffers[names[1]] = made.add(host.view, [x], {"shape": y.type.shape}).out
            elif op == "launch":
                made.add(host.launch, [x, y], {"kernel": "k", "grid": (1,)})
            else:
                attrs = {"kind": "sum", "groups": GROUPS.get(op, ((0, 1),)), "site": ""}
                kind = "ts.send" if op == "send" else "ts.all_reduce"
                made.add(host.call, [x, y], {"op": kind, "operands": 1, "attrs": Attrs(attrs)})
        return made.block((), ()).nodes

    def name(self, node):
        if node.regions:
            return [self.name(n) for n in node.regions[0].nodes]
        names = {v: name for name, v in self.buffers.items()}
        op = node.op.__name__ if node.op is not host.call else "call"
        return " ".join([op, *(names[v] for v in (*node.args, *node.results))])


ORDERS = {
    "a result that was read before": (
        ["launch r y", "reduce x r", "launch a b"], ["launch r y", "start x r", "launch a b", "wait x r"],
    ),
    "an operand that is overwritten": (
        ["reduce x r", "launch a b", "launch a x", "launch a c"],
        ["start x r", "launch a b", "wait x r", "launch a x", "launch a c"],
    ),
    "a message before": (
        ["launch a x", "send c d", "launch a b", "reduce x r", "launch a e"],
        ["launch a x", "call c d", "start x r", "launch a b", "launch a e", "wait x r"],
    ),
    "a message in a branch": (
        ["launch a x", ["send c d"], "launch a b", "reduce x r", "launch a e"],
        ["launch a x", ["call c d"], "start x r", "launch a b", "launch a e", "wait x r"],
    ),
    "a branch that reads the result": (
        ["reduce x r", "launch a b", ["launch r c"], "launch a d"],
        ["start x r", "launch a b", "wait x r", ["launch r c"], "launch a d"],
    ),
    "a bucket": (
        ["reduce x r", "launch a y", "reduce y s", "launch a b", "launch a c", "launch a d"],
        ["launch a y", "start x r", "start y s", "launch a b", "launch a c", "launch a d", "wait x r", "wait y s"],
    ),
    "other groups": (
        ["reduce x r", "launch a y", "pairs y s", "launch a b", "launch a c", "launch a d"],
        ["start x r", "launch a y", "start y s", "launch a b", "launch a c", "launch a d", "wait x r", "wait y s"],
    ),
    "a bucket that one of two would delay": (
        ["reduce x r", "reduce y s", "launch a z", "launch s b", "reduce z t", "launch a c", "launch a d"],
        ["start x r", "start y s", "launch a z", "start z t", "wait y s", "launch s b", "launch a c", "launch a d",
         "wait x r", "wait z t"],
    ),
    "the result of another": (
        ["reduce x r", "launch a b", "reduce r s", "launch a c", "launch s d"],
        ["start x r", "launch a b", "wait x r", "start r s", "launch a c", "wait r s", "launch s d"],
    ),
    "a view of a view": (
        ["launch a b", "view x y", "view y z", "reduce z r", "launch a c"],
        ["view x y", "view y z", "start z r", "launch a b", "launch a c", "wait z r"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_where_collectives_start_and_end(name):
    given, wanted = ORDERS[name]
    assert Program(given).steps == wanted


def test_orders_of_other_types_have_other_digests():
    steps = ["reduce x r", "reduce y s"]
    orders = [Program(steps, size).main.attrs["collective_order"] for size in (4, 5, 4)]
    assert orders[0] == orders[2] != orders[1] and orders[0][0][0] == GROUPS["reduce"]


def test_collectives_of_symbolic_sizes_are_calls():
    def find():
        x, w = np.ones((3, 4), np.float32), np.eye(4, dtype=np.float32)
        function = ts.jit(lambda x, w: (ts.all_reduce(ts.exp(x)), ts.tanh(x @ w) @ w))
        program = prepare(function, [x, w], "llvm", dynamic=True)
        assert any(n.op is host.call for n in program.levels["schedule"].main.body.nodes)
        return program.run("device", "llvm")[0]

    for found in ts.spmd(find, mesh=ts.Mesh(2), out_specs="ranks")():
        np.testing.assert_allclose(found, np.full((3, 4), 2 * np.e), rtol=1e-6)
