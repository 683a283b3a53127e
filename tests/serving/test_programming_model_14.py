"""The programming model, chapters 14.2 and 14.3: its classes as they are written there, and what they leave open."""

import asyncio
import time
from collections import defaultdict
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import services

import tessera


class ProductionServer:
    """High-performance model serving"""

    def __init__(self, model_path, config):
        self.model = tessera.load(model_path)
        self.config = config

        # Request batching
        self.batcher = tessera.serving.DynamicBatcher(
            max_batch_size=config.max_batch, timeout_ms=config.batch_timeout, padding_strategy="left"
        )

        # Memory management
        self.cache_manager = tessera.serving.CacheManager(cache_size=config.cache_size, eviction_policy="lru")

        # Load balancing
        self.load_balancer = tessera.serving.LoadBalancer(replicas=config.num_replicas, strategy="least_connections")

    async def serve(self, request):
        """Handle incoming requests"""
        # Automatic batching
        batch = await self.batcher.add(request)

        # Cache lookup
        cached = self.cache_manager.get(batch.hash())
        if cached:
            return cached

        # Load balance across replicas
        replica = self.load_balancer.select()

        # Execute with monitoring
        with tessera.monitor.request(request.id):
            result = await replica.infer(batch)

        # Cache result
        self.cache_manager.put(batch.hash(), result)

        return result


def test_production_server(scores):
    config = SimpleNamespace(max_batch=4, batch_timeout=20, cache_size=8, num_replicas=2)
    server = ProductionServer(scores, config)
    rows = [np.full((1, 4), i, np.float32) for i in (1, 2, 3, 4, 1)]
    calls = []

    def model(inputs):
        calls.append(len(inputs))
        return server.model(inputs)

    async def main():
        requests = [tessera.serving.InferenceRequest(x, model=model) for x in rows]
        found = await asyncio.gather(*map(server.serve, requests[:4]))
        return [*found, await server.serve(requests[4])]

    before = tessera.monitor.default_metrics()
    for x, found in zip(rows, asyncio.run(main()), strict=True):
        for y, want in zip(found, services.want_scores(x), strict=True):
            np.testing.assert_allclose(y, want, rtol=1e-5)
    assert calls == [4] and server.cache_manager.hits == 1 and before.count("request_seconds") >= 4


EOS = 95


def tokenize(prompt):
    return [ord(c) - 32 for c in prompt]


def KVCache():
    return None


class ContinuousBatchingServer:
    """Optimized for text generation"""

    def __init__(self, model):
        self.model = model
        self.active_sequences = {}

    async def generate_stream(self, prompt, max_length=2048):
        """Streaming generation with continuous batching"""
        seq_id = tessera.uuid()
        self.active_sequences[seq_id] = {"tokens": tokenize(prompt), "cache": KVCache(), "position": 0}

        while self.active_sequences[seq_id]["position"] < max_length:
            # Batch all active sequences
            batch = self.prepare_batch()

            # Single forward pass for all sequences
            next_tokens = await self.model.generate_next(batch)

            # Update sequences
            for sid, token in zip(batch.seq_ids, next_tokens, strict=True):
                self.active_sequences[sid]["tokens"].append(token)
                self.active_sequences[sid]["position"] += 1

                # Yield token for this sequence
                if sid == seq_id:
                    yield token

                # Check stopping condition
                if token == EOS or self.should_stop(sid):
                    del self.active_sequences[sid]


def test_the_loop_of_the_chapter(language_model):
    class Server(ContinuousBatchingServer):
        def prepare_batch(self):
            return SimpleNamespace(seq_ids=list(self.active_sequences), sequences=list(self.active_sequences.values()))

        def should_stop(self, sid):
            return False

    class Model:
        async def generate_next(self, batch):
            found = []
            for tokens in (s["tokens"] for s in batch.sequences):
                logits = language_model.logits([*tokens, *[0] * (16 - len(tokens))]).numpy()
                found.append(int(np.argmax(logits[len(tokens) - 1])))
            return found

    async def main():
        return [token async for token in Server(Model()).generate_stream("ab", max_length=3)]

    assert asyncio.run(main()) == services.complete_alone(language_model, "ab", 3).tokens


def test_continuous_batching_server(language_model):
    """What the chapter's class is for, whole: many streams, each with the tokens of its prompt alone."""
    prompts = ["ab", "the sea", "x", "long " * 9, "ab"]
    want = [services.complete_alone(language_model, p, 10).tokens for p in prompts]

    async def take(server, prompt):
        return [token async for token in server.generate_stream(prompt, max_length=10)]

    async def main():
        with tessera.serving.ContinuousBatchingServer(language_model, slots=4, longest=128) as server:
            found = await asyncio.gather(*(take(server, p) for p in prompts))
            early = server.generate_stream("ab", max_length=50)
            await anext(early)
            await early.aclose()  # a stream that is closed ends its request
            return found, server.engine

    found, engine = asyncio.run(main())
    assert found == want and engine.open == 0 and not engine.scheduler.busy


SLA_THRESHOLD = 0.05


class ModelMonitor:
    """Monitor model in production"""

    def __init__(self):
        self.metrics = tessera.monitoring.MetricsCollector()
        self.alerting = tessera.monitoring.AlertManager()
        self.logging = tessera.monitoring.Logger()

    def monitor_inference(self, model):
        """Track inference metrics"""

        @self.metrics.track
        def monitored_inference(input):
            # Automatic metric collection
            output = model(input)

            # Custom metrics
            self.metrics.record("input_length", len(input))
            self.metrics.record("output_confidence", output.max())

            # Data drift detection
            if self.detect_drift(input):
                self.alerting.trigger("data_drift", severity="warning")

            # Performance degradation
            if self.metrics.latency_p99 > SLA_THRESHOLD:
                self.alerting.trigger("sla_violation", severity="critical")

            return output

        return monitored_inference

    def detect_drift(self, input):
        """Detect distribution shift"""
        current_stats = self.compute_statistics(input)
        baseline_stats = self.baseline_statistics

        # KL divergence for drift detection
        kl_div = tessera.stats.kl_divergence(current_stats, baseline_stats)

        return kl_div > self.drift_threshold


def test_model_monitor():
    class Monitor(ModelMonitor):
        baseline_statistics, drift_threshold = [50, 50, 50, 50], 0.2

        def compute_statistics(self, input):
            return tessera.monitoring.count_bins(input, [0, 1, 2, 3, 4])

    monitor = Monitor()

    def model(x):
        time.sleep(float(x.numpy()[0]) / 10)
        return tessera.softmax(x)

    monitored = monitor.monitor_inference(model)
    x = tessera.Tensor([0.0, 1.5, 2.5, 3.5])
    assert monitored(x).numpy() == pytest.approx(tessera.softmax(x).numpy())
    assert list(monitor.alerting.history) == [] and monitor.metrics.percentile("input_length", 50) == 4
    monitored(tessera.Tensor([0.9, 0.1, 0.1, 0.1]))
    monitored(x)
    assert [a.name for a in monitor.alerting.history] == ["data_drift", "sla_violation"]


class ABTestFramework:
    """A/B test model variants"""

    def __init__(self, variants):
        self.variants = variants
        self.metrics = defaultdict(list)

    async def route_request(self, request):
        """Route to appropriate variant"""
        # Determine variant (hash-based or random)
        variant = self.select_variant(request.user_id)

        # Execute with tracking
        start_time = time.time()
        result = await self.variants[variant].infer(request)
        latency = time.time() - start_time

        # Record metrics
        self.metrics[variant].append({"latency": latency, "user_id": request.user_id, "timestamp": time.time()})

        # Statistical significance testing
        if len(self.metrics[variant]) % 1000 == 0:
            self.analyze_results()

        return result

    def analyze_results(self):
        """Statistical analysis of A/B test"""
        from scipy import stats

        # Compare variants
        for variant_a, variant_b in combinations(self.variants.keys(), 2):
            metrics_a = self.metrics[variant_a]
            metrics_b = self.metrics[variant_b]

            # T-test for latency
            t_stat, p_value = stats.ttest_ind([m["latency"] for m in metrics_a], [m["latency"] for m in metrics_b])
            return p_value


def test_ab_framework():
    class Framework(ABTestFramework):
        def select_variant(self, user_id):
            return tessera.serving.select_variant(user_id, {"a": 1, "b": 1})

    variants = {name: tessera.serving.ThreadReplica(lambda x, f=f: x * f) for name, f in (("a", 1), ("b", 2))}
    framework = Framework(variants)

    async def main():
        requests = [tessera.serving.InferenceRequest([[1.0]], user_id=f"user {i}") for i in range(40)]
        return [(r.user_id, (await framework.route_request(r)).item()) for r in requests]

    for user, found in asyncio.run(main()):
        assert found == {"a": 1, "b": 2}[framework.select_variant(user)]
    assert 0 <= framework.analyze_results() <= 1
    test = tessera.serving.ABTest(variants)
    for name, held in framework.metrics.items():
        for m in held:
            test.record(name, "latency", m["latency"])
    (found,) = test.analyze_results()
    assert {found.a, found.b} == {"a", "b"} and 0 <= found.p_value <= 1
