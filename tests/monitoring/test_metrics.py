"""Metrics, alerts, logs and monitored requests."""

import asyncio
import contextlib
import io
import json
import math

import numpy as np
import pytest

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402

import tessera as ts  # noqa: E402
from tessera.core.errors import ArgumentError, UnknownNameError  # noqa: E402
from tessera.monitoring import AlertManager, Logger, MetricsCollector  # noqa: E402


def read_samples(metrics):
    """The samples that Prometheus would read."""
    found = text_string_to_metric_families(metrics.render())
    return {(s.name, *s.labels.values()): s.value for f in found for s in f.samples if not s.name.endswith("_created")}


def test_values_and_percentiles():
    metrics = MetricsCollector(window=100)
    assert math.isnan(metrics.latency_p99)
    for n in range(200):
        metrics.record("length", np.float32(n))
    metrics.record("length", ts.Tensor([250.0]))
    metrics.record("length", math.nan)
    newest = [*range(101, 200), 250]
    assert metrics.percentile("length", 99) == np.percentile(newest, 99) and metrics.count("length") == 100
    samples = read_samples(metrics)
    assert samples["tessera_length_sum",] == sum(range(200)) + 250 and samples["tessera_length_count",] == 201
    assert samples["tessera_length_not_finite_total",] == 1
    for name, value in (("a b", 1), ("length", "1"), ("length", [1, 2]), ("length", None), (3, 1)):
        with pytest.raises(ArgumentError):
            metrics.record(name, value)
    with pytest.raises(UnknownNameError):
        metrics.count("width")
    for percent in (-1, 101, math.nan, True):
        with pytest.raises(ArgumentError):
            metrics.percentile("length", percent)


def test_tracked_calls():
    metrics = MetricsCollector()

    @metrics.track
    def divide(a, b):
        """a / b."""
        return a / b

    @metrics.track
    async def wait(seconds):
        await asyncio.sleep(seconds)
        return seconds

    assert divide(1, 2) == 0.5 and divide.__doc__ == "a / b."
    assert asyncio.run(wait(0.05)) == 0.05
    with pytest.raises(ZeroDivisionError):
        divide(1, 0)
    assert metrics.count("latency") == 3 and metrics.latency_p99 >= 0.049 > metrics.latency_p50
    assert metrics.latency_p50 <= metrics.latency_p90 <= metrics.latency_p95 <= metrics.latency_p99
    assert read_samples(metrics)["tessera_failures_total", "ZeroDivisionError"] == 1


def test_alerts():
    now, seen = [0.0], []
    alerts = AlertManager([lambda a: 1 / 0, seen.append], interval=10, clock=lambda: now[0])
    assert alerts.trigger("drift", severity="warning", model="a") and not alerts.trigger("drift")
    assert alerts.trigger("drift", severity="critical") and alerts.trigger("sla")
    now[0] = 10.0
    assert alerts.trigger("drift")
    assert [(a.name, a.severity, a.time) for a in seen] == [
        ("drift", "warning", 0), ("drift", "critical", 0), ("sla", "warning", 0), ("drift", "warning", 10)
    ]  # fmt: skip
    assert seen[0].details == {"model": "a"} and list(alerts.history) == seen
    with pytest.raises(ArgumentError):
        alerts.trigger("drift", severity="loud")


def test_logs_are_lines_of_json():
    out = io.StringIO()
    log = Logger("service", level="warning", stream=out)
    log.info("quiet")
    log.warning('a "quote"\nand a line', size=np.int64(3), x=ts.Tensor([1.0, 2.0]), big=np.zeros(99), y=math.inf)
    log.critical("end")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first["message"] == 'a "quote"\nand a line' and first["level"] == "warning"
    assert "Infinity" not in out.getvalue() and first["y"] == "inf"
    assert (first["size"], first["x"], first["big"]) == (3, [1.0, 2.0], "float64[99]")
    assert second["message"] == "end" and second["level"] == "critical"
    with pytest.raises(ArgumentError):
        log.error("x", time=3)
    with pytest.raises(ArgumentError):
        Logger(level="loud")


def test_monitored_requests():
    metrics = MetricsCollector()
    with ts.monitor.request("a", metrics=metrics):
        pass
    with pytest.raises(KeyError), ts.monitor.request(metrics=metrics, name="infer"):
        raise KeyError
    samples = read_samples(metrics)
    assert samples["tessera_request_seconds_count",] == 1 and ("tessera_request_failed_count",) not in samples
    assert samples["tessera_infer_seconds_count",] == samples["tessera_infer_failed_count",] == 1
    before = ts.monitor.default_metrics()
    with ts.monitor.request(3):
        pass
    assert before.count("request_seconds") >= 1


def test_spans(monkeypatch):
    """A tracer of OpenTelemetry gets a span for each request; without its API there is none."""
    made = []

    class Tracer:
        @contextlib.contextmanager
        def start_as_current_span(self, name, attributes):
            made.append((name, attributes))
            yield "span"

    for tracer, value in ((Tracer(), "span"), (None, None)):
        monkeypatch.setattr("tessera.monitoring.monitor._find_tracer", lambda tracer=tracer: tracer)
        with ts.monitor.request("7", metrics=MetricsCollector(), name="infer") as span:
            assert span == value
    assert made == [("infer", {"request.id": "7"})]


def test_a_request_takes_its_own_time():
    metrics = MetricsCollector()
    for _ in range(3):
        with ts.monitor.request(name="work", metrics=metrics):
            pass
    samples = read_samples(metrics)
    total = next(v for (name, *_), v in samples.items() if "work_seconds" in name and name.endswith("_sum"))
    assert 0 <= total < 60  # not a time of day


@pytest.mark.parametrize("interval", [True, -1.0, "60", math.nan])
def test_an_interval_is_a_number_of_seconds(interval):
    with pytest.raises(ArgumentError, match="interval"):
        AlertManager(interval=interval)
