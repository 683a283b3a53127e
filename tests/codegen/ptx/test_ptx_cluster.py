"""Thread-block clusters: the blocks of a cluster share operand fetches by multicast."""

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ptxcheck import emit_checked

import tessera as ts
from tessera import tile
from tessera.codegen.ptx import BACKEND
from tessera.codegen.ptx.runtime.emulated_program import TEXT_FILE, choose_hardware_grid, make_tensor_map
from tessera.core.errors import ArgumentError, ResourceError, TesseraError
from tessera.core.types import bf16, f16, fp8_e4m3, int8
from tessera.frontend.kernel import kernel
from tessera.interp.target.ptx import PtxModule
from tessera.runtime.program import prepare


@kernel
def product(a, b, out, *, BM: int, BN: int, BK: int, turned: bool = False):
    m, n = tile.program_id(0) * BM, tile.program_id(1) * BN
    acc = tile.zeros((BM, BN), a.type.accumulate)
    for k in tile.range(0, a.shape[1], BK):
        left = tile.load(a[m : m + BM, k : k + BK], edge="clip")
        if turned:
            right = tile.transpose(tile.load(b[n : n + BN, k : k + BK], edge="clip"))
        else:
            right = tile.load(b[k : k + BK, n : n + BN], edge="clip")
        acc += tile.dot(left, right)
    tile.store(out[m : m + BM, n : n + BN], tile.cast(acc, out.dtype), edge="clip")


def arguments(shape, block, dtype=bf16, turned=False):
    m, n, k = shape
    random, scale = np.random.default_rng(m + n), 30 if dtype == int8 else 1
    a, b = ((random.standard_normal(s) * scale).astype(dtype.numpy) for s in ((m, k), (k, n)))
    out = np.full((m, n), -1, np.int32 if dtype == int8 else np.float32)
    constants = dict(zip(("BM", "BN", "BK"), block, strict=True))
    right = np.ascontiguousarray(b.T) if turned else b
    return {"a": a, "b": right, "out": out, **constants, "turned": turned}, a.astype("f8") @ b.astype("f8")


def artifact(given, cluster, arch="sm_90a"):
    grid = tuple(-(-n // given[b]) for n, b in zip(given["out"].shape, ("BM", "BN"), strict=True))
    entry = product.with_schedule(ts.Schedule(cluster=cluster, stages=3))
    return emit_checked(prepare(entry, given, "ptx", grid).levels["tile"], arch)


def debugged(found, given, processors=4, change=lambda text: text):
    """The text in the PTX emulator's debug mode, with so many multiprocessors."""
    (launch,), (entry,) = found.manifest["plan"]["launches"], found.manifest["plan"]["entries"].values()
    arrays = [given[name] for name in ("a", "b", "out")]
    maps = [make_tensor_map(each, arrays[each["param"]]) for each in entry["maps"]]
    grid, text = choose_hardware_grid(launch, entry, processors), change(found.text(TEXT_FILE))
    PtxModule(text).launch(launch["kernel"], grid, entry["threads"], [*maps, *arrays], entry["shared"], debug=True)
    return grid


@pytest.mark.in_turn("turned")
@pytest.mark.parametrize("processors", [4, 7])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("shape", "block", "cluster"),
    [((256, 256, 200), (64, 128, 64), 2), ((130, 504, 136), (64, 256, 64), 2), ((512, 200, 72), (64, 256, 64), 4),
     ((128, 504, 136), (128, 64, 64), 4)],
)  # fmt: skip
def test_cluster_multicast(shape, block, cluster, turned, processors):
    given, want = arguments(shape, block, turned=turned)
    found = artifact(given, cluster)
    grid = debugged(found, given, processors)
    assert grid[0] % cluster == 0 and f".reqnctapercluster {cluster}" in found.text(TEXT_FILE)
    assert np.abs(given["out"] - want).max() <= 1e-4 * np.abs(want).max()


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    *[st.integers(1, 300)] * 3, st.sampled_from([bf16, f16, fp8_e4m3, int8]), st.booleans(), st.sampled_from([2, 4])
)  # fmt: skip
def test_any_size_divisible_by_clusters(m, n, k, dtype, turned, cluster):
    eight = dtype.bits == 8
    n, k = -(-n // 16) * 16, -(-k // 16) * 16
    given, want = arguments((64 * cluster * 2 - m % 60, n, k), (64, 256, 128 if eight else 64), dtype, turned or eight)
    BACKEND.interpreter(artifact(given, cluster))([given[name] for name in ("a", "b", "out")])
    limit = {int8: 0, fp8_e4m3: 2.0**-12}.get(dtype, 1e-4)
    assert np.abs(given["out"].astype("f8") - want).max() <= limit * np.abs(want).max()


def test_stage_waits_for_all_blocks_of_the_cluster():
    given, _ = arguments((256, 256, 640), (64, 128, 64))
    found = artifact(given, 2)
    alone = lambda text: re.sub(r"(mbarrier.init.shared::cta.b64 \[\S+\]), 2;", r"\1, 1;", text)  # noqa: E731
    assert alone(found.text(TEXT_FILE)) != found.text(TEXT_FILE)
    with pytest.raises(TesseraError):
        debugged(found, given, 2, alone)


def test_refused_clusters():
    given, _ = arguments((192, 128, 64), (64, 128, 64))
    for cluster, arch in ((2, "sm_90a"), (3, "sm_90a"), (2, "sm_80")):
        with pytest.raises(ResourceError, match=f"clusters of {cluster}"):
            artifact(given, cluster, arch)
    with pytest.raises(ArgumentError, match="cluster"):
        ts.Schedule(cluster=0)


def test_a_schedule_without_clusters_has_none():
    given, _ = arguments((256, 256, 64), (64, 128, 64))
    assert "cluster" not in artifact(given, 1).manifest["plan"]["entries"]["product"]
    assert "multicast" not in artifact(given, 1).text(TEXT_FILE)
