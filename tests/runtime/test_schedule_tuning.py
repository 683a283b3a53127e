"""Tuned functions: legal schedules on each target, the fastest measured one, the file that keeps it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.contract import emit_artifact, get_backend, load_interpreter
from tessera.core.errors import ArgumentError, FileError, OutOfBoundsError, ResourceError
from tessera.ir.core import structural_hash
from tessera.runtime import driver, planning
from tessera.runtime.planning import ScheduleSearch, tune_schedule


def attend(q, k, v):
    return ts.softmax(q @ k.T) @ v


RNG = np.random.default_rng(0)
ARRAYS = [RNG.standard_normal(s).astype("f4") for s in ((70, 40), (90, 40), (90, 130))]


def expected(q, k, v):
    scores = q.astype("f8") @ k.T.astype("f8")
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setenv("TESSERA_THREADS", "1")
    monkeypatch.setattr(planning, "_RESULTS", {})
    monkeypatch.setattr(planning, "BUDGET", 0.0)
    return tmp_path / "autotune.json"


def measure_by(monkeypatch, seconds_of):
    """Calls take as long as a function of the choice says."""
    measured = []

    def measure(function, target, arrays, wanted, samples):
        measured.extend(dict(c.choice) for c in wanted)
        return [planning._make_trial(c, [seconds_of(dict(c.choice))] * samples, "") for c in wanted]

    monkeypatch.setattr(planning, "_measure", measure)
    return measured


@pytest.mark.parametrize("target", ["llvm", "ptx"])
def test_every_listed_schedule_is_legal_and_right(target):
    function = ts.jit(attend).trace(*ARRAYS).function
    listed = planning.list_schedules(function, target)
    assert dict(listed[0].choice) == {} and len({repr(c.choice) for c in listed}) == len(listed)
    assert len(listed) > (2 if target == "ptx" else 4)  # tiles that are powers of two coincide more often
    assert len({structural_hash(c.tile) for c in listed}) == len(listed)  # no two that are the same kernels
    backend, plan = get_backend(target), driver.find_plan(target)
    ranked = [c.seconds for c in listed[1:]]
    assert ranked == sorted(ranked) and all(0 < s < 1 for s in ranked)
    for candidate in (listed[1], listed[-1]):
        assert not candidate.refused and (plan.find_refused is None or not plan.find_refused(candidate.tile))
        (out,) = load_interpreter(backend, emit_artifact(backend, candidate.tile, {}))(ARRAYS)
        np.testing.assert_allclose(out, expected(*ARRAYS), rtol=2e-5, atol=2e-5)


def test_a_schedule_that_the_resource_model_refuses_is_not_taken(monkeypatch):
    refused = lambda module: {f.name for f in module.functions[1:] if "matmul" in f.name}  # noqa: E731
    monkeypatch.setattr(planning.driver, "find_plan", lambda t, c={}: _refusing(driver_plan(t, c), c, refused))
    function = ts.jit(lambda x, y: x @ y).trace(np.ones((300, 64), "f4"), np.ones((64, 300), "f4")).function
    found = tune_schedule(function, "ptx", [])
    assert any("shared memory or registers" in t.refused for t in found.trials) and "m" not in found.config


driver_plan = driver.find_plan


def _refusing(plan, choice, refused):
    from dataclasses import replace

    return replace(plan, find_refused=refused) if "m" in choice else plan


def test_the_fastest_of_each_group_are_combined(monkeypatch, own_cache):
    measured = measure_by(monkeypatch, lambda c: 1.0 - 0.2 * ("programs" in c) - 0.3 * ("rows" in c))
    entry = ts.jit(attend, target="llvm", tune=True)
    found = entry.tuning(*ARRAYS)
    assert found.config.keys() == {"programs", "rows"} and found.latency_ms == pytest.approx(500)
    assert measured[0] == {} and not found.cached and len(json.loads(own_cache.read_text())["entries"]) == 1
    np.testing.assert_allclose(entry(*ARRAYS).numpy(), expected(*ARRAYS), rtol=2e-5, atol=2e-5)
    number = len(measured)
    monkeypatch.setattr(planning, "_RESULTS", {})
    again = ts.jit(attend, target="llvm", tune=True).tuning(*ARRAYS)
    assert again.cached and again.config == found.config and len(measured) == number  # nothing was measured again
    ts.jit(attend, target="llvm", tune=True).tuning(ARRAYS[0][:50], *ARRAYS[1:])
    assert len(measured) > number  # another size


def test_noise_does_not_replace_the_compilers_own_schedule(monkeypatch):
    measure_by(monkeypatch, lambda c: 0.98 if c else 1.0)
    assert ts.jit(attend, target="llvm", tune=True).tuning(*ARRAYS).config == {}


def test_a_broken_file_is_an_error_and_a_measurement_is_real(own_cache):
    function = ts.jit(lambda x: ts.exp(x) * 2.0).trace(np.ones(70000, "f4")).function
    arrays = [np.linspace(-2, 2, 70000, dtype="f4")]
    found = tune_schedule(function, "llvm", arrays, ScheduleSearch(keep=2, samples=1))
    assert 1e-4 < found.latency_ms < 1e3 and sum(t.latency_ms is not None for t in found.trials) in (3, 4)
    (out,) = driver.compile_graph(function, "llvm", choice=found.config)(arrays)
    np.testing.assert_allclose(out, np.exp(arrays[0]) * 2, rtol=1e-6)
    own_cache.write_text("{")
    planning._RESULTS.clear()
    with pytest.raises(FileError):
        tune_schedule(function, "llvm", arrays)


def test_random_numbers_donation_and_captures_are_those_of_the_call(monkeypatch):
    measure_by(monkeypatch, lambda c: 1.0)
    held = ts.tensor(np.arange(8, dtype="f4"))

    def step(x, cache):
        return ts.dropout(x, 0.5) + held, cache + x

    ts.manual_seed(3)
    plain = [t.numpy() for _ in range(2) for t in ts.jit(step, target="llvm")(ts.ones(8), ts.ones(8))]
    ts.manual_seed(3)
    tuned = ts.jit(step, target="llvm", tune=True, donate="cache")
    made = [t.numpy() for _ in range(2) for t in tuned(ts.ones(8), ts.ones(8))]
    for a, b in zip(plain, made, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("options", [{"tune": "yes"}, {"tune": True, "dynamic": True}, {"tune": 1}])
def test_what_cannot_be_tuned(options):
    with pytest.raises(ArgumentError, match="tune"):
        ts.jit(attend, **options)


def test_counts_that_are_none_and_functions_that_are_not_tuned():
    with pytest.raises(ArgumentError, match="keep=0"):
        ScheduleSearch(keep=0)
    with pytest.raises(ArgumentError, match="is not tuned"):
        ts.jit(attend).tuning(*ARRAYS)
    assert ts.jit(attend, target="interp", tune=True).tuning(*ARRAYS).config == {}


def test_errors_of_the_program_are_its_own_and_a_schedule_that_cannot_be_compiled_is_refused(monkeypatch):
    pick = ts.jit(lambda x, i: ts.exp(x)[i], target="llvm", tune=True)
    with pytest.raises(OutOfBoundsError):
        pick(np.ones(5000, "f4"), np.array(5000))
    compile_graph, made = driver.compile_graph, []

    def refuse(function, device, *given, choice):
        made.append(choice)
        if len(made) == 2:
            raise ResourceError("too large")
        return compile_graph(function, device, *given, choice=choice)

    monkeypatch.setattr(planning.driver, "compile_graph", refuse)
    function = ts.jit(lambda x: ts.exp(x)).trace(np.ones(70000, "f4")).function
    found = tune_schedule(function, "llvm", [np.ones(70000, "f4")], ScheduleSearch(keep=2, samples=1))
    assert [t.refused for t in found.trials].count("too large") == 1 and dict(found.config) != dict(made[1])


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "3"])
def test_counts_of_a_search(wrong):
    with pytest.raises(ArgumentError, match="no count of schedules"):
        ScheduleSearch(samples=wrong)


def test_a_long_call_is_timed_once_for_a_sample_and_a_short_one_often(monkeypatch):
    clock = SimpleNamespace(now=0.0, calls=[])

    def make(seconds):
        def run(arrays):
            clock.now += seconds
            clock.calls.append(seconds)

        return run

    monkeypatch.setattr(planning, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    long, short = 10 * planning.SHORTEST, planning.SHORTEST / 8.5
    times = planning._alternate({0: make(long), 1: make(short)}, [], 3)
    assert times[0] == pytest.approx([long] * 3) and times[1] == pytest.approx([short] * 3)
    assert clock.calls.count(long) == 1 + 3 and clock.calls.count(short) == 1 + 3 * 8
