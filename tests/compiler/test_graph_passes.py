"""Passes of users over graphs: what they rewrite, that they are verified, and where they appear."""

from dataclasses import replace

import numpy as np
import pytest

import tessera as ts
from tessera.compiler import GraphIR, GraphPass, graph_pass, only, passes
from tessera.errors import ArgumentError, ShapeError, UnknownNameError, VerifyError
from tessera.ir.core import Block
from tessera.runtime import driver
from tessera.tools.cli.main import main

X, W, B = (np.random.default_rng(0).standard_normal(s).astype("f4") for s in ((4, 8), (8, 8), (8,)))


def ops(function, *args, given=()):
    with only(*given):
        traced = ts.jit(function).trace(*args).function
        levels = dict(driver.iterate_passes(traced, driver.find_plan("llvm")))
    found = [m for name, m in levels.items() if given and name.startswith(given[-1].__name__)]
    made = found[-1] if found else levels["trace"]
    return [n.op.name.removeprefix("ts.") for n in made.main.body.nodes]


def rewriting(pattern, replacement, count=None):
    class Rewriting(GraphPass):
        def run(self, graph):
            assert count is None or len(graph.find_matches(pattern)) == count
            return self.replace_pattern(graph, pattern, replacement)

    return Rewriting


def test_a_chain_of_names_gives_its_operands_without_broadcasts():
    seen = []

    def fused(x, w, b):
        seen.append((x.shape, w.shape, b.shape))
        return ts.maximum(x @ w + b, 0.0)

    made = ops(lambda x, w, b: ts.relu(x @ w + b), X, W, B, given=[rewriting(["matmul", "add", "relu"], fused, 1)])
    assert seen and set(seen) == {((4, 8), (8, 8), (8,))} and "maximum" in made and "relu" not in made


@pytest.mark.parametrize("target", ["interp", "llvm", "ptx"])
def test_a_pass_runs_on_every_target_and_computes_the_same(target):
    function = lambda x, w, b: ts.gelu(ts.layer_norm(ts.relu(x @ w + b), weight=b, bias=b))  # noqa: E731
    linear = rewriting(["linear", "relu"], lambda x, w, b: ts.maximum(x @ w + b, 0.0), 1)
    norm = rewriting(["layernorm", "gelu"], lambda x, g, b: ts.gelu(ts.layer_norm(x, weight=g, bias=b)), 1)
    want = ts.jit(function)(X, W, B).numpy()
    with only(linear, norm):
        found = ts.jit(function, target=target)(X, W, B).numpy()
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("pattern", "program", "count"),
    [
        (lambda x, w, b: ts.relu(x @ w + b), lambda x, w, b: ts.relu(b + x @ w), 1),  # a sum commutes
        (lambda x: ts.exp(x) + 1.0, lambda x, w, b: ts.exp(x) + 1.0, 1),
        (lambda x: ts.exp(x) + 1.0, lambda x, w, b: ts.exp(x) + 2.0, 0),  # another constant
        (lambda x: ts.exp(x) + 1.0, lambda x, w, b: (lambda y: (y + 1.0) * y)(ts.exp(x)), 0),  # exp is used outside
        (lambda x: x * x, lambda x, w, b: x * x, 1),
        (lambda x: x * x, lambda x, w, b: x * b, 0),
        (lambda x: ts.sum(x, axis=-1), lambda x, w, b: ts.sum(x, axis=0), 0),
        (lambda x: ts.softmax(x), lambda x, w, b: ts.softmax(w), 1),
        (["exp", "exp"], lambda x, w, b: ts.exp(ts.exp(ts.exp(ts.exp(x)))), 2),
        (["exp", "add"], lambda x, w, b: (ts.exp(x), ts.exp(x) + 1.0), 1),
    ],
)
def test_what_a_pattern_matches(pattern, program, count):
    graph = GraphIR(ts.jit(program).trace(X, W, B).function)
    assert len(graph.find_matches(pattern)) == count


def test_a_wrong_pass_is_refused_with_its_line_and_values():
    wrong = rewriting(["relu"], lambda x: ts.maximum(x, x * 0.01))
    with passes(wrong), pytest.raises(VerifyError, match=r"Rewriting.* changes what .* computes: result 0") as caught:
        ts.jit(lambda x: ts.relu(x))(X)
    assert caught.value.location.file == __file__
    with ts.compiler.check_values(False), passes(wrong):
        assert ts.jit(lambda x: ts.relu(x))(X).numpy().min() < 0


def test_a_pass_that_reassociates_is_within_the_bound():
    summed = rewriting(["add", "add"], lambda a, b, c: a + (b + c), 1)
    with passes(summed):
        found = ts.jit(lambda x, y, z: x + y + z)(X, W[:4], X).numpy()
    np.testing.assert_allclose(found, X + W[:4] + X, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (lambda x: x / x, lambda x: x * 0.0 + 1.0),  # at 0
        (lambda x: ts.sqrt(x * x), lambda x: x),  # below 0
        (lambda x: ts.exp(ts.log(x)), lambda x: x),
        (["floor"], lambda x: ts.round(x)),
    ],
)
def test_the_samples_show_what_is_wrong_for_special_values(pattern, replacement):
    function = pattern if callable(pattern) else lambda x: ts.floor(x)
    with passes(rewriting(pattern, replacement)), pytest.raises(VerifyError):
        ts.jit(function)(X)


@pytest.mark.parametrize(
    ("replacement", "error", "message"),
    [
        (lambda x: ts.sum(x), ShapeError, "another type"),
        (lambda x, y: x, ArgumentError, "cannot be called"),
        (lambda x: x * ts.Tensor(X), ArgumentError, "not an operand"),
        (lambda x: "x", ArgumentError, "returned a str"),
    ],
)
def test_replacements_that_do_not_fit(replacement, error, message):
    with passes(rewriting(["relu"], replacement)), pytest.raises(error, match=message):
        ts.jit(lambda x: ts.relu(x))(X)


@pytest.mark.parametrize("pattern", [["rellu"], [], "relu", [3], 7, lambda: 1, lambda x: ts.split(x, 2)])
def test_patterns_that_are_none(pattern):
    graph = GraphIR(ts.jit(lambda x: ts.relu(x)).trace(X).function)
    with pytest.raises((UnknownNameError, ArgumentError)):
        graph.replace_pattern(pattern, lambda x: x)


def test_a_pass_must_give_a_graph_and_keep_effects():
    with passes(lambda graph: None), pytest.raises(ArgumentError, match="gives no graph"):
        ts.jit(lambda x: x + 1.0)(X)

    def drop(graph):
        return graph.keep_only([n for n in graph.nodes if n.op.name != "ts.add"])

    with passes(drop), pytest.raises(ArgumentError, match="its result is used"):
        ts.jit(lambda x: x + 1.0)(X)


class Folding(GraphPass):
    def run(self, graph):
        for node in graph.nodes:
            if self.all_inputs_constant(node):
                graph.replace_with_constant(node, self.evaluate(node))
        return graph.keep_only(self.find_used_nodes(graph))


def test_constants_are_folded_through_one_another():
    def program(x):
        scale = ts.full((4, 8), 3.0) * 2.0 + 1.0
        return x * ts.exp(scale)

    assert ops(program, X, given=[Folding]) == ["full", "mul"]
    with only(Folding):
        found = ts.jit(program)(X).numpy()
    np.testing.assert_allclose(found, X * np.exp(np.float32(7)), rtol=1e-6)


@pytest.mark.parametrize("dtype", [ts.f32, ts.bf16, ts.int32, ts.uint8, ts.bool])
def test_a_constant_of_few_runs_is_held_in_pieces(dtype):
    want = np.repeat(np.array([1, 0, 1]), [3, 2, 4]).astype(dtype.numpy)

    def use(graph):
        return graph.replace_with_constant(graph.nodes[-1], want)

    with ts.compiler.check_values(False), passes(use):
        found = ts.jit(lambda x: x.to(dtype))(np.zeros(9, "f4"))
    assert found.dtype == dtype and (found.numpy() == want).all()


def test_a_wrong_constant_is_found():
    def wrong(graph):
        return graph.replace_with_constant(next(n for n in graph.nodes if n.op.name == "ts.mul"), np.full((2,), 7.0))

    with passes(wrong), pytest.raises(VerifyError, match="changes what"):
        ts.jit(lambda x: x + ts.full((2,), 3.0) * 2.0)(np.ones(2, "f4"))
    with passes(lambda g: g.replace_with_constant(g.nodes[-1], np.ones(3))), pytest.raises(ShapeError):
        ts.jit(lambda x: x + 1.0)(np.ones(2, "f4"))


def test_an_installed_pass_reaches_programs_compiled_before():
    program = ts.jit(lambda x: ts.relu(x) + 1.0)
    program(X)
    seen = []

    @graph_pass
    def note(graph):
        seen.append(graph)
        return graph

    try:
        program(X)
        assert len(seen) == 1 and ts.compiler.installed_passes()[-1] == "note"
        program(X)
        assert len(seen) == 1
    finally:
        ts.compiler.uninstall(note)
    with pytest.raises(ArgumentError):
        ts.compiler.uninstall(note)


def test_passes_of_one_function_and_of_loops():
    double = rewriting(["exp"], lambda x: ts.exp2(x * 1.4426950408889634))

    def program(x):
        return ts.scan(lambda carry, _: (ts.exp(carry * 0.1), carry), x, xs=ts.zeros((3,)))[0]

    made = passes(double)(ts.jit(program))
    np.testing.assert_allclose(made(X).numpy(), ts.jit(program)(X).numpy(), rtol=1e-6)
    found = [n.op.name for n in ts.compiler.run_passes(made.trace(X).function, [double]).body.walk()]
    assert "ts.exp2" in found and "ts.exp" not in found


# The class has a name of its own: the pages' passes may be registered in the same process.
PROGRAM = """
import tessera as ts

@ts.compiler.graph_pass
class Sloped(ts.compiler.GraphPass):
    def run(self, graph):
        return self.replace_pattern(graph, ["relu"], lambda x: ts.maximum(x, x * 0.01))

@ts.example(lambda rng: (rng.standard_normal((4, 8), dtype="f4"),))
@ts.jit
def layer(x):
    return ts.exp(ts.relu(x))
"""


def test_inspect_shows_and_bisect_blames_a_wrong_pass(tmp_path, capsys):
    (tmp_path / "program.py").write_text(PROGRAM)
    name = f"{tmp_path / 'program.py'}:layer"
    with only():
        assert main(["inspect", name, "--pass-by-pass"]) == 0
        assert "after Sloped" in capsys.readouterr().out
        assert main(["bisect", name]) == 1
        assert "Sloped is the first step that goes wrong" in capsys.readouterr().out
        assert main(["run", name, "--target", "llvm"]) == 2
        assert "VerifyError: the compiler pass Sloped changes" in capsys.readouterr().err


class Noting(GraphPass):
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def run(self, graph):
        self.seen.append(self.name)
        return graph


def test_instances_of_one_class_are_passes_of_their_own():
    seen, program = [], ts.jit(lambda x: x + 1.0)
    with passes(Noting(1, seen), Noting(2, seen)):
        program(X)
    assert seen == [1, 2]
    first, second = (passes(Noting(n, seen))(ts.jit(lambda x: x * 2.0)) for n in (3, 4))
    first(X), second(X)
    for n in range(5, 9):
        with passes(Noting(n, seen)):
            program(X)
    assert seen == list(range(1, 9))


def test_a_class_of_a_module_that_is_defined_again_takes_the_place_of_the_old():
    seen = []
    for n in range(2):
        made = type("Cell", (Noting,), {"__module__": "notebook", "__qualname__": "Cell",
                                        "__init__": lambda self, n=n: Noting.__init__(self, n, seen)})  # fmt: skip
        graph_pass(made)
    try:
        ts.jit(lambda x: x + 1.0)(X)
        assert seen == [1] and ts.compiler.installed_passes().count("Cell") == 1
    finally:
        ts.compiler.uninstall(made)


@ts.kernel
def talk(x, out):
    i = ts.tile.program_id(0)
    print("row", i)
    out[i, :] = x[i, :] * 2.0


def test_a_pass_may_not_drop_an_effect():
    def program(x):
        out = ts.zeros(x.shape)
        talk[4,](x, out)
        return x

    def silence(graph):
        function = graph.function
        return GraphIR(replace(function, body=Block(function.params, (), function.params)))

    with passes(silence), pytest.raises(VerifyError, match="changes the effects"):
        ts.jit(program)(X)

    def retype(graph):
        function = graph.function
        return GraphIR(replace(function, body=replace(function.body, results=())))

    with passes(retype), pytest.raises(VerifyError, match="changes the type"):
        ts.jit(program)(X)
