"""Searches of autotuning: every one, a model's best, a genetic search, and one of the user's own."""

import math

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError
from tessera.runtime.launch import tuner as measuring


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    monkeypatch.setattr(measuring, "_RESULTS", {})


def cut(x, *, BM: int = 4, BN: int = 4):
    i, j = tile.program_id(0) * BM, tile.program_id(1) * BN
    tile.store(x[i : i + BM, j : j + BN], tile.load(x[i : i + BM, j : j + BN]) * 2.0)


def grid(c):
    return 64 // c["BM"], 64 // c["BN"]


SIZES = [1, 2, 4, 8, 16, 32, 64]
SPACE = {"BM": SIZES, "BN": SIZES}
X = np.ones((64, 64), "f4")


@pytest.fixture
def ran(monkeypatch):
    """What was measured; a configuration takes as long as it is far from BM=16, BN=2."""
    found = []

    def measure(launch, args, named, samples):
        c = launch.kernel.bind(args, named).constants
        found.append((c["BM"], c["BN"]))
        return [1 + abs(math.log2(c["BM"] / 16)) + abs(math.log2(c["BN"] / 2))] * samples

    monkeypatch.setattr(measuring, "_measure", measure)
    return found


def test_a_genetic_search_finds_the_best_without_measuring_all(ran):
    entry = ts.autotune.evolutionary(population_size=8, generations=6, mutation_rate=0.3, space=SPACE)(cut)
    assert entry[grid].tune(X).config == {"BM": 16, "BN": 2}
    assert len(ran) == len(set(ran)) < 49
    before = list(ran)
    again = ts.autotune.evolutionary(8, 6, 0.3, space=SPACE, cache=False)(cut)
    assert again[grid].tune(X).config == {"BM": 16, "BN": 2} and ran == before * 2  # the same seed, the same way


def test_constraints_hold_for_children(ran):
    entry = ts.autotune.evolutionary(8, 4, 0.5, space=SPACE, constraints=[lambda c: c.BM == c.BN])(cut)
    assert entry[grid].tune(X).config["BM"] in (4, 8) and all(m == n for m, n in ran)


def test_without_a_space_the_block_constants_are_searched():
    entry = ts.autotune.evolutionary(generations=1)(cut)
    assert len(entry.options.tuning.configs) == 16 and entry.options.tuning.search.population_size == 50


def test_a_model_chooses_what_is_measured(ran):
    class Wide(ts.PerformanceModel):
        def predict(self, kernel, config):
            return 1 / config["BN"]

    entry = ts.kernel.autotune(space=SPACE, search=ts.Guided(Wide(), keep=7))(cut)
    assert entry[grid].tune(X).config == {"BM": 16, "BN": 64}
    assert sorted(ran) == [(m, 64) for m in SIZES]


def test_a_search_of_ones_own_learns(ran):
    """The specification's sketch of one (programming model, 9.2), with a batch that lets it learn sooner."""

    class MLAutotuner(ts.Autotuner):
        def __init__(self):
            self.model, self.history = ts.ml.PerformancePredictor(), []

        def suggest_configs(self, kernel, input_shapes):
            assert input_shapes == {"x": (64, 64)}
            predictions = self.model.predict(self.extract_features(kernel, input_shapes))
            return self.model.top_k_configs(predictions, k=10)

        def update(self, config, performance):
            self.history.append((config, performance))
            if len(self.history) % 10 == 0:
                self.model.retrain(self.history)

    entry = ts.kernel.autotune(space=SPACE, search=MLAutotuner())(cut)
    assert entry[grid].tune(X).latency_ms <= 2.0 and len(ran) < 49


def test_what_a_search_may_not_suggest():
    class Outside(ts.Autotuner):
        def suggest_configs(self, kernel, input_shapes):
            return [{"BM": 3, "BN": 3}]

    entry = ts.kernel.autotune(space=SPACE, search=Outside())(cut)
    with pytest.raises(ArgumentError, match="is no configuration of cut"):
        entry[grid].tune(X)


def test_configurations_that_cannot_run_have_no_children(monkeypatch):
    entry = ts.autotune.evolutionary(4, 3, 0.5, space={"BM": [64, 128], "BN": [64, 128]})(cut)
    found = entry[(1, 1)].tune(X)
    assert found.config == {"BM": 64, "BN": 64} and any(t.refused for t in found.trials)


@pytest.mark.parametrize("wrong", [{"population_size": 1}, {"generations": 0}, {"mutation_rate": 1.5}, {"space": {}}])
def test_no_search(wrong):
    with pytest.raises(ArgumentError):
        ts.autotune.evolutionary(**wrong)(cut)


def test_results_travel(tmp_path, ran):
    entry = ts.kernel.autotune(space=SPACE)(cut)
    entry[grid].tune(X)
    exported = ts.TuningCache().export(tmp_path / "a.json")
    other = ts.TuningCache(tmp_path / "b.json")
    assert other.merge(exported) == 1 and other.merge(exported) == 0
    measuring._RESULTS.clear()
    assert ts.kernel.autotune(space=SPACE, cache=other.path)(cut)[grid].tune(X).cached and len(ran) == 49


def test_a_search_keeps_one_configuration_at_least():
    assert ts.Guided(ts.PerformanceModel(), keep=1).keep == 1
    with pytest.raises(ArgumentError):
        ts.Guided(ts.PerformanceModel(), keep=0)
