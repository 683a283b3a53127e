"""Variants of random programs: right programs agree with them, and each finds the fault that it is for."""

from contextlib import suppress
from dataclasses import replace
from random import Random

import numpy as np
import pytest

import tessera as ts
from tessera.lower.passes import canonicalisation
from tessera.runtime import driver
from tessera.runtime.program import PreparedProgram, prepare
from tessera.tools.fuzz import variants
from tessera.tools.fuzz.derivative_relations import RELATIONS, compare_derivatives
from tessera.tools.fuzz.oracle import list_fuzz_engines
from tessera.tools.fuzz.programs import Input, RandomProgram

SOURCE = """def program(x0, x1):
    v0 = ts.cumsum(ts.tanh(x0) * x1, axis=0)
    return v0, ts.max(v0, axis=1)
"""
PROGRAM = RandomProgram(SOURCE, (Input("x0", (5, 3), "f32", "uniform", 1), Input("x1", (3,), "f32", "uniform", 2)))
NAMES = {"random passes", "other tiles", "batch", "symbolic sizes", "padded sizes", "later sizes", "donated arguments",
         "other machine", "other layouts", "other forms", "artifact", *RELATIONS}  # fmt: skip


def run_all(program=PROGRAM):
    """The results of the first two variants of each name that are drawn in 90 draws."""
    prepared, targets = prepare(program.load(), program.arguments()), ("llvm", "csl")
    drawn = [v for seed in range(90) for v in variants.list_variants(program, prepared, Random(seed), targets)]
    found = {}
    for name, run in drawn:
        if len(found.get(name, ())) < 2:
            with suppress(variants.NotComparableError):
                found.setdefault(name, []).append(run())
    return found


def test_every_variant_is_drawn_and_agrees():
    found = run_all()
    assert set(found) == NAMES
    want = prepare(PROGRAM.load(), PROGRAM.arguments()).run("graph")
    for name, runs in found.items():
        for result, reference in ((r, w) for results in runs for r, w in zip(results, want, strict=True)):
            np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (4, 3, 2)])
def test_an_array_in_another_order_has_its_elements(shape, rng):
    x = rng.normal(size=shape)
    found = [variants.relay(x, Random(seed)) for seed in range(20)]
    assert all(np.array_equal(x, each) for each in found)
    assert len({each.strides for each in found}) > (len(shape) > 1)


@pytest.mark.parametrize("name", variants.FORMS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (4, 3, 2)])
def test_an_input_of_another_form_has_its_elements(name, shape, rng):
    x = rng.normal(size=shape).astype(np.float32)
    for seed in range(5):
        array, give_back = variants.FORMS[name](x, Random(seed))
        np.testing.assert_array_equal(give_back(ts.Tensor(array)).numpy(), x)


def test_a_rewrite_that_takes_a_permutation_for_a_reshape_is_found(monkeypatch):
    monkeypatch.setattr(canonicalisation, "sorted", list, raising=False)
    want = prepare(PROGRAM.load(), PROGRAM.arguments()).run("tile")[0]
    found = [variants._run_with_other_forms(PROGRAM, "interp", Random(str(seed)))[0] for seed in range(9)]
    assert not all(np.allclose(r, want) for r in found)
    monkeypatch.undo()
    for seed in range(5):
        (result, _) = variants._run_with_other_forms(PROGRAM, "interp", Random(seed))
        np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6)


def test_a_level_that_reads_memory_in_the_order_of_rows_is_found(monkeypatch):
    prepared = prepare(PROGRAM.load(), PROGRAM.arguments())
    (right, _) = prepared.run("graph")
    real = PreparedProgram.compile

    def compile_flat(self, *args):
        program = real(self, *args)
        flat = lambda arrays: program.function([a.ravel("K").reshape(a.shape) for a in arrays])  # noqa: E731
        return replace(program, function=flat)

    monkeypatch.setattr(PreparedProgram, "compile", compile_flat)
    assert not all(np.array_equal(variants._run_other_layouts(prepared, Random(s))[0], right) for s in range(5))


def test_a_batch_that_takes_values_of_the_other_lane_is_found(monkeypatch):
    def first_lane_twice(function):
        return lambda x0, x1: tuple(ts.stack([r, r]) for r in function(x0[0], x1[0]))

    monkeypatch.setattr(ts, "vmap", first_lane_twice)
    right = prepare(PROGRAM.load(), PROGRAM.arguments()).run("graph")
    assert not np.allclose(variants._run_batch(PROGRAM)[0], right[0])


SMOOTH = replace(PROGRAM, source=SOURCE.replace("ts.max(v0, axis=1)", "ts.exp(x0)"))
WRONG = {
    "forward mode": lambda m: m.setattr(ts, "jvp", _change(ts.jvp)),
    "tape": lambda m: m.setattr(ts, "grad", _change_made(ts.grad)),
    "jacobians": lambda m: m.setattr(ts, "jacrev", _change_made(ts.jacrev)),
    "hessian": lambda m: m.setattr(ts, "hessian", _change_made(ts.hessian)),
    "checkpoint": lambda m: m.setattr(ts, "checkpoint", _change_made(ts.checkpoint)),
    "microbatches": lambda m: m.setattr(ts, "per_example_grad", _change_made(ts.per_example_grad)),
}


def _change(real):
    """A transform whose results are a thousandth too large."""
    return lambda *given: ts.tree.map(lambda t: t * 1.001, real(*given))


def _change_made(real):
    return lambda *given: _change(real(*given))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_derivative_is_found(name, monkeypatch):
    for seed in range(5):
        compare_derivatives(name, SMOOTH, Random(seed))
    WRONG[name](monkeypatch)
    with pytest.raises(variants.RelationError):
        for seed in range(5):  # some elements have a derivative of 0
            compare_derivatives(name, SMOOTH, Random(seed))


def test_a_call_that_writes_its_argument_is_found(monkeypatch):
    real = variants.Jit.__call__

    def call(self, *args, **named):
        found = real(self, *args, **named)
        if not isinstance(named["x1"], ts.Tensor):
            named["x1"][0] = 7.0
        return found

    monkeypatch.setattr(variants.Jit, "__call__", call)
    with pytest.raises(variants.RelationError, match="the call changes its argument x1"):
        variants._run_donated(PROGRAM, "interp")


def test_a_result_that_shows_an_argument_is_found(monkeypatch):
    monkeypatch.setattr(driver, "_copy_views", lambda results, arguments: list(results))
    turned = replace(PROGRAM, source=SOURCE.replace("return v0", "return x0.T"))
    with pytest.raises(variants.RelationError, match="shares the memory of an argument"):
        variants._run_donated(turned, "interp")


def test_gradients_that_saturate_add_up_by_their_policy():
    source = "def program(x0, x1):\n    return ts.cast(x0, dtype=ts.f32 @ ts.saturate) * x1\n"
    inputs = tuple(Input(f"x{i}", (5, 16), "f32", "extreme", i + 1) for i in range(2))
    for seed in range(5):
        compare_derivatives("tape", RandomProgram(source, inputs), Random(seed))


def test_a_program_without_such_a_variant_is_not_comparable():
    whole = RandomProgram("def program(x0):\n    return x0 + 1\n", (Input("x0", (1,), "int32"),))
    for run in (lambda: compare_derivatives("tape", whole, Random(0)),
                lambda: variants._run_with_symbolic_sizes(whole, "interp", Random(0))):  # fmt: skip
        with pytest.raises(variants.NotComparableError):
            run()


def test_the_engines_with_guard_bytes_give_their_target():
    assert [e.target for e in list_fuzz_engines(("llvm",)) if e.level == "device"] == ["llvm"]


KERNEL = """@ts.kernel
def program(x, out, B: ts.constexpr):
    at = tile.program_id(0) * B
    tile.store(out[at : at + B], tile.load(x[at : at + B], other=0.0) * 2.0, edge="clip")
"""


def test_a_kernel_is_drawn_with_other_blocks_stages_layouts_and_machines():
    blocks = [((1,), {"B": 16}), ((9,), {"B": 1})]
    inputs = (Input("x", (9,), "f32", "uniform", 1), Input("out", (9,), "f32", "zeros"))
    kernel = RandomProgram(KERNEL, inputs, (2,), None, {"B": 8}, tuple(blocks))
    found = run_all(kernel)
    assert set(found) == {"other constants", "other stages", "other machine", "other layouts", "queued launches",
                          "artifact"}  # fmt: skip
    for results in (results for runs in found.values() for results in runs):
        np.testing.assert_array_equal(results[0], inputs[0].make() * 2)


@pytest.mark.parametrize("target", variants.MACHINES)
def test_each_machine_of_a_target_exists(target):
    """An option that a generator does not have, or a value that it refuses, would count as a failure of programs."""
    prepared = prepare(PROGRAM.load(), PROGRAM.arguments())
    want = prepared.run("graph")
    for seed in range(8):
        for result, reference in zip(variants._run_on_other_machine(prepared, target, Random(seed)), want, strict=True):
            np.testing.assert_allclose(result, reference, rtol=1e-5, atol=1e-6)
