"""Models of performance: counts by hand, rooflines by hand, interpolation, and what does not fit."""

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError
from tessera.frontend.kernel.kernel_function import KernelLaunch
from tessera.tools.performance.candidates import Candidates
from tessera.tools.performance.cost_models import Device, device_of

M = N = K = 64


def product(a, b, c, *, BM: int = 16, BN: int = 16):
    i, j = tile.program_id(0) * BM, tile.program_id(1) * BN
    c[i : i + BM, j : j + BN] = a[i : i + BM, :] @ b[:, j : j + BN]


def candidates(configs, dtype=np.float32, function=product):
    entry = ts.kernel.autotune(configs=configs)(function)
    arrays = [np.ones((M, K), dtype), np.ones((K, N), dtype), np.zeros((M, N), np.float32)]
    return Candidates(KernelLaunch(entry, lambda c: (M // c["BM"], N // c["BN"])), arrays, {}, configs)


@pytest.mark.parametrize(("bm", "bn"), [(16, 16), (64, 16), (32, 64)])
def test_counts(bm, bn):
    kernel = candidates([{"BM": bm, "BN": bn}]).at({"BM": bm, "BN": bn})
    assert kernel.count_flops() == 2 * M * N * K and kernel.groups == (M // bm) * (N // bn)
    assert kernel.count_memory_bytes() == 4 * (M * K * (N // bn) + K * N * (M // bm) + M * N)


def test_a_roofline_by_hand():
    """The specification's formula (programming model, 9.3): the slower of memory and arithmetic."""
    kernel = candidates([{"BM": 16, "BN": 16}]).at({"BM": 16, "BN": 16})
    slow_memory = Device("toy", 1e15, 1e15, 1e6, 16)
    slow_units = Device("toy", 1e6, 1e6, 1e15, 16)
    assert ts.RooflineModel(slow_memory).predict(kernel) == kernel.count_memory_bytes() / 1e6
    assert ts.RooflineModel(slow_units).predict(kernel) == kernel.count_flops() / 1e6
    few = Device("toy", 1e6, 1e6, 1e15, 12)  # 16 groups on 12 processors: four of them work twice
    assert ts.RooflineModel(few).predict(kernel) == pytest.approx(kernel.count_flops() / 1e6 * 1.5)


def test_matrix_units_are_for_narrow_products():
    config = {"BM": 16, "BN": 16}
    assert not candidates([config]).at(config).multiplies_matrices
    assert candidates([config], ts.f16.numpy).at(config).multiplies_matrices


def test_larger_tiles_read_less():
    ranked = candidates([{"BM": n, "BN": n} for n in (8, 16, 32)]).ranked(
        ts.RooflineModel(Device("", 1e15, 1e15, 1e9, 1))
    )
    assert [p.config["BM"] for p in ranked] == [32, 16, 8]


def shared(a, b, c, *, BM: int = 16, BN: int = 16):
    held = tile.alloc_shared((BM * 1024, BN), ts.f32)
    held[0, 0] = 1.0
    product(a, b, c, BM=BM, BN=BN)


def test_what_does_not_fit_comes_last():
    ranked = candidates([{"BM": 64, "BN": 64}, {"BM": 1, "BN": 1}], function=shared).ranked(ts.RooflineModel("H100"))
    assert [p.config["BM"] for p in ranked] == [1, 64] and "no group of shared fits H100" in ranked[1].refused


def test_measurements_are_interpolated():
    sizes = (8, 16, 32, 64)
    kernel = candidates([{"BM": n, "BN": 64} for n in sizes])
    model, ran = ts.EmpiricalModel(samples=1), []
    model.measure = lambda k, c: model.measurements.setdefault(tuple(sorted(c.items())), ran.append(c["BM"]) or c["BM"])
    found = {n: model.predict(kernel.at({"BM": n, "BN": 64}), {"BM": n, "BN": 64}) for n in (8, 32, 16, 64)}
    assert ran == [8, 32, 64] and found[16] == pytest.approx(16.0)  # between 8 and 32, on a logarithmic scale


def test_a_measurement_is_real():
    kernel = candidates([{"BM": 16, "BN": 16}])
    model = ts.EmpiricalModel(samples=2)
    assert 0 < model.latency_ms(kernel.at(kernel.configs[0])) < 1000 and len(model.measurements) == 1


def test_peaks():
    host = device_of("cpu")
    assert host.peak_flops() > 1e8 and host.peak_bandwidth() > 1e8 and device_of("cpu") is host
    assert device_of("A100").peak_flops() == 19.5e12
    with pytest.raises(ArgumentError, match="the peaks of Z9 are not known"):
        ts.RooflineModel("Z9")
    with pytest.raises(ArgumentError, match="has no predict"):
        ts.PerformanceModel().latency_ms(candidates([{"BM": 8, "BN": 8}]).at({"BM": 8, "BN": 8}))
