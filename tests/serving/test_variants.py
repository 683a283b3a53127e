"""A/B tests: stable routing in the shares of the weights, and Welch's t-test as SciPy computes it."""

import asyncio
import math
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats

from tessera.core.errors import ArgumentError, UnknownNameError
from tessera.serving import ABTest, InferenceRequest, select_variant

USERS = [f"user {i}" for i in range(3000)]


def test_routing_is_stable_and_in_the_shares_of_the_weights():
    weights = {"a": 2, "b": 1, "c": 0}
    chosen = [select_variant(u, weights) for u in USERS]
    assert scipy.stats.binomtest(chosen.count("a"), len(USERS), 2 / 3).pvalue > 1e-4 and "c" not in chosen
    assert chosen == [select_variant(u, {"c": 0, "b": 0.5, "a": 1}) for u in USERS]  # order and scale do not matter
    other = [select_variant(u, weights, salt="2") for u in USERS]
    share = np.mean([a == b for a, b in zip(chosen, other, strict=True)])
    assert abs(share - 5 / 9) < 0.05  # independent
    program = f"from tessera.serving import select_variant; print([select_variant(u, {weights}) for u in {USERS[:20]}])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(chosen[:20])


def test_routes_and_records():
    class Replica:
        async def infer(self, request):
            return "new"

    test = ABTest({"old": lambda r: "old", "new": Replica()}, {"old": 1, "new": 3})
    for user in USERS[:50]:
        found = asyncio.run(test.route_request(InferenceRequest([[1.0]], user_id=user)))
        assert found == test.select_variant(user)
    assert sum(len(m["latency"]) for m in test.metrics.values()) == 50
    assert all(v >= 0 for m in test.metrics.values() for v in m["latency"])


def test_comparison_is_that_of_scipy():
    rng = np.random.default_rng(0)
    test = ABTest({"a": len, "b": len, "c": len})
    data = {"a": rng.normal(10, 1, 60), "b": rng.normal(10.8, 3, 40), "c": rng.normal(10, 1, 60)}
    for name, values in data.items():
        for v in values:
            test.record(name, "score", v)
    found = {(c.a, c.b): c for c in test.analyze_results("score")}
    for (a, b), c in found.items():
        want = scipy.stats.ttest_ind(data[a], data[b], equal_var=False).pvalue
        assert c.p_value == pytest.approx(min(1, 3 * want)) and c.significant == (3 * want < 0.05)
        assert (c.mean_a, c.mean_b) == pytest.approx((data[a].mean(), data[b].mean()))
    assert len(found) == 3 and test.analyze_results() == []


def test_constant_metrics():
    test = ABTest({"a": len, "b": len})
    for name, value in (("a", 1.0), ("b", 1.0)) * 3:
        test.record(name, "x", value)
        test.record(name, "y", value + (name == "b"))
    assert [c.significant for n in "xy" for c in test.analyze_results(n)] == [False, True]


def test_false_alarms_are_as_rare_as_stated():
    rng, alarms = np.random.default_rng(1), 0
    for _ in range(200):
        test = ABTest({"a": len, "b": len})
        for name, count, spread in (("a", 10, 5), ("b", 60, 1)):
            for v in rng.normal(0, spread, count):
                test.record(name, "x", v)
        alarms += test.analyze_results("x")[0].significant
    assert scipy.stats.binomtest(alarms, 200, 0.05).pvalue > 1e-3  # Student's test gives about 40 %


def test_misuse():
    for variants, named in (({"a": len}, {}), ({"a": len, "b": len}, {"weights": {"a": 1}}),
                            ({"a": len, "b": len}, {"weights": {"a": 0, "b": 0}}),
                            ({"a": len, "b": len}, {"weights": {"a": -1, "b": 2}}),
                            ({"a": len, "b": len}, {"significance": 1})):  # fmt: skip
        with pytest.raises(ArgumentError):
            ABTest(variants, **named)
    test = ABTest({"a": len, "b": len})
    with pytest.raises(UnknownNameError):
        test.record("c", "x", 1)
    for value in (math.nan, "1", True):
        with pytest.raises(ArgumentError):
            test.record("a", "x", value)
    with pytest.raises(ArgumentError):
        select_variant("u", {})
