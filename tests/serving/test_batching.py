"""Dynamic batching: what is batched together, padding, and that no request gets the rows of another."""

import asyncio
import time

import numpy as np
import pytest
import services

import tessera as ts
from tessera.core.errors import ArgumentError, ShapeError
from tessera.serving import (
    CacheManager,
    DynamicBatcher,
    InferenceRequest,
    ServedModel,
    ServerOptions,
    TensorDescription,
    create_app,
)
from tessera.serving.served_models import merge_programs


def run_together(batcher, inputs, function=None):
    """For each input its result and the number of rows that ran with it."""

    async def serve(x):
        slot = await batcher.add(x)

        async def run(arrays):
            await asyncio.sleep(0)
            return function(arrays) if function else arrays["input"] * 2

        return np.asarray(await slot.run(run)), slot.batch.rows

    async def main():
        return await asyncio.gather(*map(serve, inputs))

    return asyncio.run(main())


@pytest.mark.parametrize(("rows", "most", "batches"), [
    ([1, 1, 1], 8, [3, 3, 3]), ([1] * 5, 2, [2, 2, 2, 2, 1]), ([2, 2, 1], 3, [2, 3, 3]), ([9, 1], 4, [9, 1]),
    ([1], 1, [1]), ([3, 3, 3], 9, [9, 9, 9]),
])  # fmt: skip
def test_sizes_of_batches(rows, most, batches):
    inputs = [np.full((n, 2), 10 * i + np.arange(n)[:, None]) for i, n in enumerate(rows)]
    found = run_together(DynamicBatcher(most, timeout_ms=20), inputs)
    assert [size for _, size in found] == batches
    for x, (y, _) in zip(inputs, found, strict=True):
        assert (y == 2 * x).all() and y.shape == x.shape


def test_other_shapes_types_and_models_are_other_batches():
    inputs = [np.ones((1, 2)), np.ones((1, 3)), np.ones((1, 2), np.float32), np.ones((1, 2))]
    assert [size for _, size in run_together(DynamicBatcher(8, 20), inputs)] == [2, 1, 1, 2]
    models = [InferenceRequest(np.ones((1, 2)), model=m) for m in (len, max, len)]
    assert [size for _, size in run_together(DynamicBatcher(8, 20), models)] == [2, 1, 2]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side):
    seen = []

    def note(arrays):
        seen.append(arrays["ids"])
        return arrays["ids"].sum(axis=1, keepdims=True)

    inputs = [{"ids": np.arange(1, n + 1)[None], "mask": np.ones((1, n), bool)} for n in (2, 4, 1)]
    found = run_together(DynamicBatcher(8, 20, padding_strategy=side, padding_value=0), inputs, note)
    assert [y.item() for y, _ in found] == [3, 10, 1]
    left = [[0, 0, 1, 2], [1, 2, 3, 4], [0, 0, 0, 1]]
    assert seen[0].tolist() == (left if side == "left" else [[1, 2, 0, 0], [1, 2, 3, 4], [1, 0, 0, 0]])


def test_a_failure_reaches_every_request_of_the_batch():
    async def main():
        batcher, calls = DynamicBatcher(2, 20), []

        async def fail(arrays):
            calls.append(1)
            raise ValueError("no")

        async def serve():
            return await (await batcher.add([[1.0]])).run(fail)

        return await asyncio.gather(serve(), serve(), return_exceptions=True), calls

    found, calls = asyncio.run(main())
    assert [str(e) for e in found] == ["no", "no"] and calls == [1]


def test_a_cancelled_request_leaves_the_others_their_result():
    async def main():
        batcher = DynamicBatcher(2, 20)

        async def slow(arrays):
            await asyncio.sleep(0.05)
            return arrays["input"]

        async def serve(x):
            return await (await batcher.add([[x]])).run(slow)

        first, second = asyncio.ensure_future(serve(1.0)), asyncio.ensure_future(serve(2.0))
        await asyncio.sleep(0.02)
        first.cancel()
        return await second

    assert asyncio.run(main()).tolist() == [[2.0]]


def test_results_without_rows_are_refused():
    for result in (np.float64(1), np.ones((3, 1))):
        with pytest.raises(ShapeError, match="rows of its batch"):
            run_together(DynamicBatcher(2, 1), [[[1.0]], [[2.0]]], lambda arrays, r=result: r)


def test_requests():
    request = InferenceRequest({"a": ts.Tensor([[1.0]]), "b": [[2]]})
    assert request.rows == 1 and len(request.id) == 36 and request.id != InferenceRequest([[1]]).id
    assert InferenceRequest([[1.0]]).hash() == InferenceRequest(np.array([[1.0]])).hash()
    others = [[[1.0, 0.0]], [[1.0], [0.0]], [[-1.0]], np.ones((1, 1), np.float32), {"x": [[1.0]]}]
    assert len({InferenceRequest(x).hash() for x in [[[1.0]], *others]}) == 6
    for wrong in ({}, {"a": "text"}, {"a": None}, [[1], [2, 3]]):
        with pytest.raises(ArgumentError):
            InferenceRequest(wrong)
    for wrong in (1.0, np.ones((0, 2)), {"a": [[1]], "b": [[1], [2]]}):
        with pytest.raises(ShapeError):
            InferenceRequest(wrong)
    for named in ({"max_batch_size": 0}, {"timeout_ms": -1}, {"padding_strategy": "top"}, {"timeout_ms": np.nan}):
        with pytest.raises(ArgumentError):
            DynamicBatcher(**named)


def infer(app, x, name="scores"):
    """The outputs for each row group, sent together."""
    body = lambda rows: {"json": {"inputs": [{"name": "x", "shape": list(rows.shape), "datatype": "FP32",  # noqa: E731
                                              "data": rows.tolist()}]}}  # fmt: skip
    found = services.call(app, *(("POST", f"/v2/models/{name}/infer", body(rows)) for rows in x))
    return [[np.reshape(o["data"], o["shape"]) for o in r.json()["outputs"]] if r.status_code == 200 else r.status_code
            for r in found]  # fmt: skip


@pytest.mark.parametrize("kind", ["symbolic", "fixed", "bundle"])
def test_served_models_in_batches(scores, kind, tmp_path):
    source = {"symbolic": lambda: scores, "fixed": lambda: services.build_scores(tmp_path / "a", dynamic=False, rows=4),
              "bundle": lambda: ts.save(ts.bundle(services.score, np.ones((1, 4), np.float32), services.WEIGHT,
                                                  targets=["llvm"], batch_sizes=[2, 4], weights=["w"]),
                                        tmp_path / "scores.bundle")}[kind]()  # fmt: skip
    model = ServedModel("scores", source, ServerOptions(max_batch_size=8, batch_timeout_ms=30))
    assert model.accepted[0].shape == (-1, 4) and model.batcher.max_batch_size == (8 if kind == "symbolic" else 4)
    sizes, execute = [], model.balancer.replicas[0].execute

    async def note(inputs, run=None):
        sizes.append(len(inputs["x"]))
        return await execute(inputs, run)

    model.balancer.replicas[0].execute = note
    x = [np.random.default_rng(i).normal(size=(n, 4)).astype(np.float32) for i, n in enumerate((1, 1, 1, 2, 3))]
    for rows, found in zip(x, infer(create_app({"scores": model}), x), strict=True):
        for y, want in zip(found, services.want_scores(rows), strict=True):
            np.testing.assert_allclose(y, want, rtol=1e-5)
    assert sizes == ([8] if kind == "symbolic" else [4, 4, 4] if kind == "fixed" else [4, 2, 4]), sizes
    if kind != "symbolic":
        assert infer(create_app({"scores": model}), [np.ones((5, 4), np.float32)]) == [400]


def test_a_bundle_without_batching_names_its_numbers_of_rows(tmp_path):
    made = ts.bundle(services.score, np.ones((1, 4), np.float32), services.WEIGHT, targets=["llvm"],
                     batch_sizes=[1, 4], weights=["w"])  # fmt: skip
    app = create_app({"scores": ts.save(made, tmp_path / "scores.bundle")})
    one, two, four = (np.ones((n, 4), np.float32) for n in (1, 2, 4))
    assert [type(found) for found in infer(app, [one, two, four])] == [list, int, list]
    body = {"inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": two.tolist()}]}
    refused = services.post(app, "/v2/models/scores/infer", json=body)
    assert refused.status_code == 400 and "expected 1 or 4; with --max-batch above 1" in refused.json()["error"]


def test_programs_of_a_bundle_have_the_same_tensors():
    one, two = TensorDescription("x", "f32", (2, 3)), TensorDescription("x", "f32", (4, 3))
    assert merge_programs([[one], [two]]) == [TensorDescription("x", "f32", (-1, 3))]
    for other in ([], [one, two], [TensorDescription("y", "f32", (2, 3))], [TensorDescription("x", "int32", (2, 3))]):
        with pytest.raises(ArgumentError, match="different tensors"):
            merge_programs([[one], other])


def test_models_whose_rows_depend_on_each_other_are_not_batched(tmp_path):
    @ts.jit
    def centre(x: ts.Tensor["B", 4]):
        return x - ts.mean(x, axis=0)

    @ts.jit
    def total(x: ts.Tensor["B", 4]):
        return ts.sum(x, axis=0)

    for i, function in enumerate((centre, total)):
        path = ts.build(function, np.ones((2, 4), np.float32), out=tmp_path / str(i), dynamic=True)
        with pytest.raises((ArgumentError, ShapeError), match="depend on each other|rows of its batch"):
            ServedModel("m", path, ServerOptions(max_batch_size=4))
        assert ServedModel("m", path).accepted[0].shape == (-1, 4)
    specs = [TensorDescription("x", "f32", (4,)), TensorDescription("y", "f32", (5,))]
    with pytest.raises(ArgumentError, match="first axis"):
        ServedModel("m", lambda x, y: x, ServerOptions(max_batch_size=4), inputs=specs, outputs=specs[:1])


def test_cached_responses(scores):
    model = ServedModel("scores", scores, ServerOptions(cache_size=2))
    app = create_app({"scores": model})
    a, b, c = (np.full((1, 4), n, np.float32) for n in (1, 2, 3))
    for x in (a, b, a, c, b):  # c evicts b
        (found,) = infer(app, [x])
        np.testing.assert_allclose(found[0], services.want_scores(x)[0], rtol=1e-5)
    assert (model.cache.hits, model.cache.misses, len(model.cache)) == (1, 4, 2)
    assert 'tessera_cache_hits{model="scores"} 1.0' in services.get(app, "/metrics").text


def test_cache():
    cache = CacheManager(cache_size=3, max_bytes=100)
    x = np.zeros(5)
    cache.put("a", {"y": x})
    x[:] = 1
    assert (cache.get("a")["y"] == 0).all() and not cache.get("a")["y"].flags.writeable
    cache.put("b", [np.zeros(5)])
    cache.get("a")
    cache.put("c", np.zeros(5))  # 120 bytes: the least recently used goes
    assert cache.get("b") is None and cache.get("a") is not None and cache.bytes == 80
    cache.put("d", np.zeros(99))  # larger than the cache
    assert cache.get("d") is None and len(cache) == 2
    cache.put("a", 1)
    assert cache.get("a") == 1 and cache.bytes == 40
    first = CacheManager(2, "fifo")
    for key in "ab":
        first.put(key, key)
    first.get("a")
    first.put("c", "c")
    assert first.get("a") is None
    empty = CacheManager(0)
    empty.put("a", 1)
    assert empty.get("a") is None
    for named in ({"cache_size": -1}, {"eviction_policy": "random"}, {"max_bytes": True}):
        with pytest.raises(ArgumentError):
            CacheManager(**named)


def test_a_batch_grows_while_the_replica_is_busy():
    sizes, spec = [], [TensorDescription("x", "f32", (-1, 1))]

    def slow(x):
        time.sleep(0.3)
        sizes.append(len(x))
        return 2 * x

    options = ServerOptions(max_batch_size=8, batch_timeout_ms=1)
    model = ServedModel("m", slow, options, inputs=spec, outputs=[TensorDescription("y", "f32", (-1, 1))])
    sizes.clear()

    async def ask(i):
        await asyncio.sleep(0.02 * i)
        return (await model.infer({"x": np.full((1, 1), i, np.float32)}))["y"].item()

    async def main():
        return await asyncio.gather(*map(ask, range(6)))

    assert asyncio.run(main()) == [0, 2, 4, 6, 8, 10]
    assert sum(sizes) == 6 and len(sizes) == 2
    model.close()


def test_a_batch_that_waits_for_a_replica_runs_when_the_others_are_gone():
    async def main():
        busy, batcher = [True], None
        batcher = DynamicBatcher(8, 1, is_busy=lambda: busy[0])
        first = asyncio.ensure_future(batcher.add(np.ones((1, 2))))
        second = asyncio.ensure_future(batcher.add(np.ones((1, 3))))
        await asyncio.sleep(0.1)
        assert not first.done() and not second.done()
        first.cancel()
        batcher.release()  # for a batch without a request
        busy[0] = False
        return (await asyncio.wait_for(second, 5)).batch.rows

    assert asyncio.run(main()) == 1
