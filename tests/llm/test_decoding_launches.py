"""A decoding step on a GPU: a decoder layer of one row is at most six launches, and what they compute is right.

They are the norm with the product of queries, keys and values; their rotation, the write to the cache and attention, in
two parts; the product with the residual; the norm, gate and activation; the last product with its residual.
"""

import numpy as np
import pytest

import tessera as ts
from tessera.codegen.donation import reuse_donated
from tessera.ops.dialects import host
from tessera.runtime import driver
from tessera.stdlib.quantised import QuantisedMatrix

SIZES = {"vocabulary": 300, "width": 288, "heads": 9, "kv_heads": 3, "head_size": 32, "hidden": 544, "context": 256}
GPT = {"rotary": None, "norm": "layer", "feed_forward": "gelu", "kv_heads": 9}
KINDS = {"llama": ({}, None), "gpt2": (GPT, None), "4 bits": ({}, True), "8 bits": ({}, False)}


def quantise(weights, packed):
    """The matrices in blocks of 32 with scales, two codes in a byte with low values, or one."""
    rng = np.random.default_rng(3)
    if isinstance(weights, dict):
        return {n: quantise(w, packed) for n, w in weights.items()}
    if isinstance(weights, list):
        return [quantise(w, packed) for w in weights]
    if weights.ndim < 2:
        return weights
    n, k = weights.shape
    scale = rng.uniform(0.005, 0.01, (n, k // 32)).astype(np.float16)
    if packed:
        return QuantisedMatrix(rng.integers(0, 256, (n, k // 2), np.uint8), scale, scale * np.float16(-7.5))
    return QuantisedMatrix(rng.integers(-127, 128, (n, k), np.int8), scale / np.float16(16))


def make_model(kind, layers, target):
    changes, packed = KINDS[kind]
    config = ts.llm.DecoderConfig(**{**SIZES, **changes}, layers=layers)
    weights = ts.llm.draw_weights(config, seed=1, scale=0.06)
    weights = weights if packed is None else quantise(weights, packed)
    return ts.llm.LanguageModel(config, weights, target=target, cache_dtype=ts.bf16)


def count_launches(kind, layers):
    """The launches of a step of one request whose cache has room for 500 positions."""
    model = make_model(kind, layers, "ptx")
    session = model.new_session(1, 250)
    ones = np.ones(1, np.int32)
    table = np.zeros((1, session._width), np.int32)
    found = model._greedy.trace(model.weights, ones, table, ones, ones, session.keys, session.values)
    names = [p.hint for p in found.function.params]
    donated = [i for i, name in enumerate(names) if name.startswith(("keys", "values"))]
    module = reuse_donated(driver.lower(found.function, "ptx")["tile"], donated)
    return sum(n.op is host.launch for n in module.main.body.walk())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_six_launches(kind):
    assert count_launches(kind, 3) - count_launches(kind, 2) <= 6


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_processor(kind):
    tokens = np.random.default_rng(2).integers(0, 300, 3)
    found = {}
    for target in ("llvm", "ptx"):
        session = make_model(kind, 1, target).new_session(1, 100)
        found[target] = np.stack([session.run_step(np.array([[t]]), np.ones(1, int)).numpy() for t in tokens])
    want = found["llvm"]
    assert np.abs(found["ptx"] - want).max() <= 0.01 * np.abs(want).max()  # queries and keys are rounded to bf16
