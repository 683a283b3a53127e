"""Statistics and drift against SciPy."""

import numpy as np
import pytest
import scipy

import tessera as ts
from tessera.core.errors import ArgumentError, FileError, ShapeError
from tessera.monitoring import DriftDetector, count_bins, kl_divergence, welch_t_test

HISTOGRAMS = ([5, 3, 2], [1, 1, 1], [0.2, 0.5, 0.3], [7, 0, 1])


@pytest.mark.parametrize("p", HISTOGRAMS)
@pytest.mark.parametrize("q", HISTOGRAMS)
def test_divergence(p, q):
    assert kl_divergence(p, q) == pytest.approx(scipy.stats.entropy(p, q))
    smooth = scipy.stats.entropy(np.add(p, 0.5), np.add(q, 0.5))
    assert ts.stats.kl_divergence(ts.Tensor([float(x) for x in p]), q, smoothing=0.5) == pytest.approx(smooth)


@pytest.mark.parametrize(("p", "q", "kind"), [
    ([1, 2], [1, 2, 3], ShapeError), ([-1, 2], [1, 2], ArgumentError), ([0, 0], [1, 2], ArgumentError),
    ([1, np.nan], [1, 2], ArgumentError), ([], [], ArgumentError), (["a"], [1], ArgumentError),
    ([[1], [2, 3]], [1], ArgumentError),
])  # fmt: skip
def test_what_is_no_histogram(p, q, kind):
    with pytest.raises(kind):
        kl_divergence(p, q)
    with pytest.raises(ArgumentError):
        kl_divergence([1], [1], smoothing=-1)


def test_welch():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, 50), rng.normal(0.5, 4, 20)
    want = scipy.stats.ttest_ind(a, b, equal_var=False)
    found = welch_t_test(a, b)
    assert (found.statistic, found.degrees, found.p_value) == pytest.approx((want.statistic, want.df, want.pvalue))
    assert found.p_value != pytest.approx(scipy.stats.ttest_ind(a, b).pvalue)
    for x, y in (([1], [1, 2]), ([1, 1], [1, 1]), ([1, np.inf], [1, 2])):
        with pytest.raises(ArgumentError):
            welch_t_test(x, y)


def test_bins_are_those_of_numpy():
    values, edges = np.random.default_rng(0).normal(size=500), [-1, -0.5, 0.5, 2]
    want, _ = np.histogram(np.clip(values, -1, 1.999), edges)
    assert count_bins(values, edges).tolist() == want.tolist()
    assert count_bins([2.0, 0.5], edges).tolist() == [0, 0, 2]
    with pytest.raises(ArgumentError, match="increase"):
        count_bins(values, [1, 1])


def test_drift(tmp_path):
    rng = np.random.default_rng(0)
    detector = DriftDetector.from_values(rng.normal(size=4000), bins=10, window=500)
    assert np.ptp(detector.baseline) < 3  # quantiles
    assert not detector.update(rng.normal(size=499)) and detector.divergence == 0
    assert not detector.update(rng.normal(size=1)) and 0 < detector.divergence < 0.05
    counts = count_bins(detector._values, detector.edges)
    want = scipy.stats.entropy(counts + 0.05, detector.baseline * 500 / 4000 + 0.05)
    assert detector.divergence == pytest.approx(want)
    back = DriftDetector.load(detector.save(tmp_path / "baseline.json"))
    assert (back.edges == detector.edges).all() and (back.baseline == detector.baseline).all()
    assert (back.threshold, back.window) == (0.1, 500)
    for each in (detector, back):
        assert each.update(1 + rng.normal(size=500))


def test_broken_baselines(tmp_path):
    path = tmp_path / "baseline.json"
    with pytest.raises(FileError, match="baseline.json"):
        DriftDetector.load(path)
    for text in ("", "[]", "{}", '{"edges": [0, 1], "baseline": [1, 2], "threshold": 1, "window": 1}', "[" * 10**5):
        path.write_text(text)
        with pytest.raises(FileError):
            DriftDetector.load(path)
    for named in ({"threshold": 0}, {"window": 0}, {"threshold": np.nan}):
        with pytest.raises(ArgumentError):
            DriftDetector([0, 1], [1], **named)
    with pytest.raises(ArgumentError):
        DriftDetector.from_values([1, 1, 1])
