"""Warm starts: the model learns a machine whose times are known, and its error is that of predictions not yet seen."""

import json

import numpy as np
import pytest
from scipy import stats

import tessera as ts
from tessera.errors import ArgumentError, FileError
from tessera.tools.performance import HybridModel, RooflineModel, WarmStart, measure_error
from tessera.tools.performance.candidates import Candidates

CONFIGS = [{"BM": m, "BN": n} for m in (2, 4, 8, 16) for n in (4, 8, 16)]


@ts.kernel
def scale(x: ts.Tensor["M", "N"], out: ts.Tensor["M", "N"], *, BM: int = 4, BN: int = 8):
    i, j = ts.tile.program_id(0) * BM, ts.tile.program_id(1) * BN
    out[i : i + BM, j : j + BN] = x[i : i + BM, j : j + BN] * 2.0


def candidates(m, n):
    x = np.ones((m, n), "f4")
    launch = scale[lambda c: (m // c["BM"], n // c["BN"])]
    return Candidates(launch, (x, np.zeros_like(x)), {}, CONFIGS)


def machine(one):
    """A machine that likes square tiles: a millisecond, times the distance from 8 x 8, and the work."""
    off = abs(np.log2(one.config["BM"] / 8)) + 0.5 * abs(np.log2(one.config["BN"] / 8))
    return 1e-6 * one.count_memory_bytes() / 1e3 * (1 + off)


def learn(model, *shapes):
    for shape in shapes:
        owner = candidates(*shape)
        for config in CONFIGS:
            model.learn(owner.at(config), machine(owner.at(config)))
    return model


def test_a_new_shape_starts_at_the_fast_configurations():
    owner = candidates(64, 64)
    best = min(machine(owner.at(c)) for c in CONFIGS)
    learned = owner.ranked(learn(HybridModel("H100"), (16, 16), (32, 16), (32, 32)))
    assert min(machine(owner.at(p.config)) for p in learned[:3]) == best
    blind = owner.ranked(RooflineModel("H100"))
    assert machine(owner.at(learned[0].config)) <= min(machine(owner.at(p.config)) for p in blind[:3])
    ranks = [stats.spearmanr(range(12), [machine(owner.at(p.config)) for p in r])[0] for r in (learned, blind)]
    assert ranks[0] > 0.5 > ranks[1] + 0.2


def test_the_error_is_of_predictions_before_they_are_learned():
    model = learn(HybridModel("H100"), (16, 16), (32, 16))
    assert model.error.count == 24 and model.error.worst > 100  # at first it was the roofline
    late = measure_error(*zip(*model.compared[-6:], strict=True))
    assert 1 < late.median < 1.6 and late.worst < 3
    predicted, measured = zip(*model.compared, strict=True)
    assert model.error.rank == pytest.approx(stats.spearmanr(predicted, measured)[0])
    assert model.error.median == pytest.approx(np.median(np.exp(np.abs(np.log(np.divide(predicted, measured))))))


def test_a_search_measures_all_at_first_and_then_a_few():
    search = WarmStart(HybridModel("H100"), keep=2)
    for shape, count in (((16, 16), 12), ((32, 32), 2)):
        owner, asked = candidates(*shape), []
        search.begin(owner, owner.shapes)
        for config in list(search.suggest_configs(owner, owner.shapes)):
            asked.append(config)
            search.update(config, 1e3 * machine(owner.at(config)))
        assert len(asked) == count == len(list(search.suggest_configs(owner, owner.shapes)))
    assert machine(candidates(32, 32).at(asked[0])) <= 2 * min(machine(owner.at(c)) for c in CONFIGS)


def test_a_kernel_is_tuned_with_a_warm_start(tmp_path):
    def make(search):
        @ts.kernel.autotune(space={"B": [2, 4, 8]}, search=search, cache=str(tmp_path / "tune.json"), samples=1)
        @ts.kernel
        def double(x: ts.Tensor["N"], *, B: int = 2):
            i = ts.tile.program_id(0) * B
            x[i : i + B] = x[i : i + B] * 2.0

        return double

    search = WarmStart(keep=1)
    kernel = make(search)
    for size in (16, 32, 64):
        x = np.ones(size, "f4")
        kernel[lambda c, size=size: (size // c["B"],)](x)
        assert (x == 2).all()
    assert len(search.model.compared) == 3 + 3 + 1 and search.model.has_learned


def test_what_was_learned_is_kept(tmp_path):
    model = learn(HybridModel("H100"), (16, 16))
    other = HybridModel.load(model.save(tmp_path / "model.json"))
    one = candidates(32, 32).at(CONFIGS[5])
    assert other.predict(one) == pytest.approx(model.predict(one))
    held = json.loads((tmp_path / "model.json").read_text())
    for wrong in ({**held, "rows": 3}, {**held, "targets": ["a"] * 12}, {**held, "targets": [1.0]}):
        (tmp_path / "bad.json").write_text(json.dumps(wrong))
        with pytest.raises(FileError):
            HybridModel.load(tmp_path / "bad.json")
    with pytest.raises(FileError):
        HybridModel.load(tmp_path / "missing.json")


def test_what_is_refused():
    one = candidates(16, 16).at(CONFIGS[0])
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ArgumentError):
            HybridModel("H100").learn(one, seconds)
    for keep in (0, True, 2.5):
        with pytest.raises(ArgumentError):
            WarmStart(keep=keep)
    assert HybridModel("H100").error is None
    with pytest.raises(ArgumentError):
        measure_error([], [])
    with pytest.raises(ArgumentError):
        HybridModel("Z80")
