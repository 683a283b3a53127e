"""One graph for several targets, and code generators of users."""

import numpy as np
import pytest

import tessera as ts
from tessera.compiler import CodeGenerator, GraphIR, Target, UniversalCompiler
from tessera.errors import ArgumentError, UnknownNameError

X, W = (np.random.default_rng(0).standard_normal(s).astype("f4") for s in ((4, 8), (8, 8)))


def program(x, w):
    return ts.softmax(x @ w)


def test_the_targets_agree_and_are_those_of_jit(tmp_path):
    made = UniversalCompiler().compile(ts.jit(program).trace(X, W), ["llvm", "cuda", "csl:2x2", Target("cpu")])
    assert [t.type for t in made] == ["cpu", "cuda", "wse", "cpu"]
    want = ts.jit(program)(X, W).numpy()
    for compiled in made.values():
        (found,) = compiled(X, W)
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    assert (made[Target("llvm")].save(tmp_path / "out") / "manifest.json").is_file()


def test_a_step_can_be_changed_for_a_target():
    seen = []

    @ts.compiler
    class Mine:
        def compile(self, graph, targets):
            return UniversalCompiler.compile(self, graph, targets)

        def optimize_for_target(self, graph, target):
            graph = UniversalCompiler.optimize_for_target(self, graph, target)
            seen.append((target.type, len(graph.nodes)))
            return graph

    made = Mine().compile(ts.jit(program).trace(X, W), ["llvm", "ptx"])
    assert [t for t, _ in seen] == ["cpu", "cuda"] and len(made) == 2


class Lines(CodeGenerator):
    """Emits the name of each op, a line for each."""

    name = "lines"

    def generate(self, tile_ir):
        return "\n".join(n.op.name for f in tile_ir.functions[1:] for n in f.body.walk())


def test_a_generator_of_the_user(monkeypatch):
    levels = ts.compiler.UniversalCompiler()
    target = Target("llvm")
    graph = levels.optimize_for_target(ts.jit(program).trace(X, W), target)
    tile = levels.lower_to_llvm(graph, levels.generate_schedule(graph, target))
    artifact = Lines().emit(tile)
    assert "ts.dot" in artifact.text("program.txt").splitlines()
    assert ts.CodeGenerator is CodeGenerator

    class Nothing(CodeGenerator):
        def generate(self, tile_ir):
            return None

    with pytest.raises(ArgumentError, match="gives no text"):
        Nothing().emit(tile)
    with pytest.raises(ArgumentError, match="has no generate"):
        CodeGenerator().emit(tile)


def test_what_is_no_target_or_graph():
    with pytest.raises(UnknownNameError):
        Target("lllvm")
    with pytest.raises(ArgumentError):
        Target(3)
    with pytest.raises(ArgumentError, match="trace it first"):
        UniversalCompiler().compile(ts.jit(program), ["llvm"])
    with pytest.raises(ArgumentError, match="decorates a class"):
        ts.compiler(3)
    assert UniversalCompiler().compile(GraphIR(ts.jit(program).trace(X, W).function), []) == {}
