"""Autotuning: what is tried, what is kept and where, and hooks around launches."""

import json

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, FileError
from tessera.frontend.kernel.autotuning import make_settings
from tessera.runtime.launch import tuner as measuring


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_RESULTS", {})
    return tmp_path / "autotune.json"


def doubled(x, *, BLOCK: int = 4):
    i = tile.program_id(0) * BLOCK
    tile.store(x[i : i + BLOCK], tile.load(x[i : i + BLOCK], edge="clip") * 2.0, edge="clip")


def grid(constants):
    return (-(-100 // constants["BLOCK"]),)


def fixed_times(monkeypatch, times):
    """Measurements replaced by given ones, by the block size."""
    ran = []

    def measure(launch, args, named, samples):
        block = launch.kernel.bind(args, named).constants["BLOCK"]
        ran.append(block)
        return [times[block]] * samples

    monkeypatch.setattr(measuring, "_measure", measure)
    return ran


@pytest.mark.parametrize("target", ["interp", "cpu"])
def test_a_tuned_kernel_computes_what_the_plain_one_does(target, rng):
    entry = ts.kernel.autotune(space={"BLOCK": [8, 32]}, samples=1, options={"target": target})(doubled)
    x = rng.random(100, dtype="f4")
    y = x.copy()
    entry[grid](y)
    np.testing.assert_array_equal(y, x * 2)


def test_the_fastest_is_kept_for_other_processes(monkeypatch, own_cache):
    ran = fixed_times(monkeypatch, {8: 3.0, 16: 1.0, 32: 2.0})
    entry = ts.kernel.autotune(space={"BLOCK": [8, 16, 32]})(doubled)
    x = np.ones(100, "f4")
    found = entry[grid].tune(x)
    assert found.config == {"BLOCK": 16} and found.latency_ms == 1.0 and not found.cached
    assert [t.latency_ms for t in found.trials] == [3.0, 1.0, 2.0]
    measuring._RESULTS.clear()  # as another process begins
    assert entry[grid].tune(x).cached and ran == [8, 16, 32]
    entry[grid].tune(np.ones(101, "f4"))  # another type
    assert ran == [8, 16, 32] * 2
    (about,) = {json.dumps(e["about"]["kernel"]) for e in json.loads(own_cache.read_text())["entries"].values()}
    assert "test_autotune.doubled" in about


def test_constraints_budget_and_configs_that_cannot_run(monkeypatch):
    ran = fixed_times(monkeypatch, {8: 3.0, 16: 1.0, 32: 2.0, 64: 1.0})
    entry = ts.autotune.search_space(BLOCK=[8, 16, 32, 64], constraints=[lambda c: c.BLOCK > 8])(doubled)
    assert entry[grid].tune(np.ones(100, "f4")).config == {"BLOCK": 16} and ran == [16, 32, 64]
    short = ts.kernel.autotune(space={"BLOCK": [8, 16, 32]}, budget_ms=16, cache=False)(doubled)
    assert short[grid].tune(np.ones(100, "f4")).config == {"BLOCK": 16}  # 5 samples of 3 and of 1 ms fill it


def test_what_cannot_run_is_left_out():
    def exact(x, *, BLOCK: int = 4):
        x[0:BLOCK] = x[0:BLOCK] * 2.0

    entry = ts.autotune(configs=[{"BLOCK": 500}, {"BLOCK": 50}], samples=1, metric="latency")(exact)
    trials = entry[1].tune(np.ones(100, "f4")).trials
    assert "outside" in trials[0].refused and trials[1].latency_ms is not None
    with pytest.raises(ArgumentError, match="no configuration of exact can run"):
        ts.autotune(configs=[{"BLOCK": 500}])(exact)[1](np.ones(100, "f4"))


def test_the_decorators_options_and_auto():
    entry = ts.kernel(autotune=True, autotune_configs=[{"BLOCK": 20}, {"BLOCK": 50}])(doubled)
    assert [c["BLOCK"] for c in entry.options.tuning.configs] == [20, 50]
    listed = ts.autotune([{"BLOCK": 20}, {"BLOCK": 50}])(doubled)
    assert [c["BLOCK"] for c in listed.options.tuning.configs] == [20, 50]
    assert [c["BLOCK"] for c in ts.kernel.auto(doubled).options.tuning.configs] == [16, 32, 64, 128]

    def plain(x):
        x[0] = 1.0

    assert ts.kernel.auto(plain).options.tuning is None


def test_what_a_kernel_has_no_constant_for_goes_to_its_schedule():
    def tiled(x, out):
        ctx = tile.context()
        tile.store(out, tile.load(x, shape=(ctx.M, ctx.N)) * 2.0)

    space = ts.ScheduleSpace().block(m=[4, 8], n=[8])
    entry = ts.kernel.autotune(space=space, samples=1)(tiled)
    x, out = np.ones((16, 16), "f4"), np.zeros((16, 16), "f4")
    entry(x, out)
    np.testing.assert_array_equal(out, x * 2)
    assert entry.configured({"BM": 8, "BN": 8}).options.tile_shape == (8, 8)
    with pytest.raises(ArgumentError, match="no constant `depth`"):
        ts.kernel.autotune(space={"depth": [1]})(tiled)


def test_a_damaged_file_is_an_error(own_cache):
    own_cache.write_text("{")
    with pytest.raises(FileError, match="not JSON"):
        ts.kernel.autotune(space={"BLOCK": [8]})(doubled)[grid](np.ones(100, "f4"))


@pytest.mark.parametrize(
    "wrong", [{}, {"space": {}, "configs": []}, {"configs": []}, {"space": {"B": [1]}, "metric": "energy"},
              {"space": {"B": [1]}, "samples": 0}, {"space": {"B": [1]}, "constraints": [lambda c: False]},
              {"space": [64, 128]}, {"space": 64}, {"space": "BLOCK"}, {"configs": [64]}],
)  # fmt: skip
def test_nothing_to_try(wrong):
    with pytest.raises(ArgumentError):
        make_settings(**wrong)


@pytest.mark.parametrize("target", ["interp", "cpu"])
def test_hooks_see_every_launch(target):
    entry, seen = ts.kernel(target=target)(doubled), []

    @entry.before
    def _(started):
        seen.append(("before", started.kernel, started.grid, started.constants["BLOCK"], started.arrays["x"][0]))

    @entry.after
    def _(started):
        seen.append(("after", started.target, started.group, started.arrays["x"][0]))

    entry.with_schedule(ts.Schedule(block=50))[grid](np.ones(100, "f4"))
    assert seen == [("before", "doubled", (2,), 50, 1.0), ("after", target, 1, 2.0)]


# Schedules of a block.


@ts.kernel
def tell_constants(out, *, BLOCK: int = 4, STAGES: int = 1):
    out[0], out[1] = BLOCK, STAGES


def constants_of(call=tell_constants, **named):
    out = np.zeros(2, np.int32)
    call[(1,)](out, **named)
    return out.tolist()


def test_a_schedule_of_a_block():
    """Inner blocks add to outer ones, constants of a call win, and nothing stays behind."""
    with ts.schedule(tile_size=16) as outer:
        assert outer == ts.Schedule(tile_m=16) and constants_of() == [16, 1]
        with ts.schedule(ts.Schedule(stages=3)):
            assert constants_of() == [16, 3] and constants_of(BLOCK=8) == [8, 3]
            assert constants_of(tell_constants.with_schedule(ts.Schedule(tile_m=2, stages=2))) == [16, 3]
        assert constants_of() == [16, 1]
    assert constants_of() == [4, 1]


def test_an_unknown_field_of_a_schedule_of_a_block():
    with pytest.raises(ArgumentError, match="wraps"), ts.schedule(wraps=2):
        pass
