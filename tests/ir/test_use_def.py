"""Use-def chains of random functions and kernels: what they say is what a walk over all nodes finds."""

from random import Random

import pytest

from tessera.ir.rewrite import UseDef
from tessera.runtime.program import prepare
from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.graph_programs import make_program


def list_scopes(seed):
    program = make_program(Choices((), Random(seed)))
    levels = prepare(program.load(), program.arguments(), "llvm").levels
    for function in (levels["graph"].main, *levels["tile"].functions):
        yield from ((function, True), (function, False))
        yield from ((region, True) for node in function.body.walk() for region in node.regions)


@pytest.mark.parametrize("seed", range(6))
def test_chains_are_those_of_a_walk(seed):
    for scope, nested in list_scopes(seed):
        body, chains = getattr(scope, "body", scope), UseDef(scope, nested)
        nodes = [*body.walk()] if nested else [*body.nodes]
        blocks = [body, *(r for n in nodes for r in n.regions if nested)]
        ends = [body.results, *(r.results for r in blocks[1:])]
        for value in {*body.params, *(v for n in nodes for v in (*n.args, *n.results))}:
            assert list(chains.users(value)) == [n for n in nodes if value in n.args]
            uses = [x for n in nodes for x in n.args] + [x for results in ends for x in results]
            assert chains.count_uses(value) == uses.count(value)
            assert chains.get(value) is next((n for n in nodes if value in n.results), None)
        assert all(chains.block_of(n) is next(b for b in blocks if n in b.nodes) for n in nodes)
