"""Decoders from saved folders against transformers on the same random weights."""

import json
from dataclasses import replace

import numpy as np
import pytest

import tessera as ts

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tessera.core.device import device  # noqa: E402
from tessera.core.errors import (  # noqa: E402
    ArgumentError,
    DTypeError,
    FileError,
    OutOfBoundsError,
    ResourceError,
    ShapeError,
)
from tessera.llm import LanguageModel, Sampling, load, read_config  # noqa: E402
from tessera.llm.pages import PagePool  # noqa: E402
from tests.llm.peers import KINDS, compute_logits, generate, make_peer  # noqa: E402

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 96, 21).tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """For each kind a model of transformers, and the folder that it wrote."""
    found = {}
    for kind in KINDS:
        peer, folder = make_peer(kind), tmp_path_factory.mktemp(kind)
        peer.save_pretrained(folder)
        found[kind] = peer, folder
    return found


@pytest.fixture(scope="module")
def llama(saved):
    return load(saved["llama"][1], target="llvm")


@pytest.fixture(scope="module")
def interpreted(saved):
    """Without machine code, for what the host alone decides: each number of rows and of tokens is a program."""
    return load(saved["llama"][1], target="interp")


def test_a_model_is_compiled_unless_a_target_says_otherwise(saved):
    folder = saved["llama"][1]
    assert load(folder).target == "llvm"
    assert load(folder, target="interp").target == "interp"
    with device("ptx"):
        assert load(folder).target == "ptx"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_logits(saved, kind, target):
    peer, folder = saved[kind]
    want = compute_logits(peer, TOKENS)
    got = load(folder, target=target).logits(TOKENS).numpy()
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


def test_logits_on_ptx(saved):
    peer, folder = saved["qwen3"]
    want = compute_logits(peer, TOKENS[:5])
    got = load(folder, target="ptx").logits(TOKENS[:5]).numpy()
    assert np.abs(got - want).max() <= 5e-5 * np.abs(want).max()


@pytest.mark.parametrize("kind", ["mistral", "gpt2"])
def test_greedy_text(saved, kind):
    peer, folder = saved[kind]
    model = load(folder, target="llvm")
    model.config = model.config.__class__(**{**model.config.__dict__, "end_tokens": ()})
    assert model.generate(TOKENS, max_tokens=12).tokens == generate(peer, TOKENS, 12)


def test_a_batch_gives_what_each_prompt_alone_gives(saved, llama):
    prompts = [TOKENS[:3], TOKENS, TOKENS[4:17]]
    sampling = [Sampling(), Sampling(1.5, top_k=7, top_p=0.9, seed=4), Sampling(1.0, top_p=0.7, seed=5)]
    together = llama.generate(prompts, max_tokens=10, sampling=sampling)
    alone = [llama.generate(p, max_tokens=10, sampling=s) for p, s in zip(prompts[1:], sampling[1:], strict=True)]
    assert together[1:] == alone
    assert together[0].tokens == generate(saved["llama"][0], prompts[0], 10)[: len(together[0].tokens)]
    assert llama.generate(prompts[1], 10, Sampling(1.5, top_k=7, top_p=0.9, seed=3)).tokens != alone[0].tokens


def test_a_draft_model_changes_nothing(saved, llama):
    prompts = [TOKENS[:3], TOKENS]
    assert llama.generate(prompts, 12, draft=llama, proposals=1) == llama.generate(prompts, 12)


def test_another_draft_model_changes_nothing(saved, interpreted):
    prompts, sampling = [TOKENS[:3], TOKENS], Sampling(0.9, seed=1)
    want = interpreted.generate(prompts, 12, sampling)
    for draft in (load(saved["qwen2"][1], target="interp"), interpreted):
        assert interpreted.generate(prompts, 12, sampling, draft=draft, proposals=3) == want


def test_a_long_prompt_comes_in_chunks(saved, monkeypatch):
    peer, folder = saved["mistral"]
    monkeypatch.setattr("tessera.llm.generation.LONGEST_CHUNK", 16)
    model = load(folder, target="llvm")
    tokens = TOKENS * 3
    got = model.new_session(1, 64).prefill([np.array(tokens)])[0]
    assert np.abs(got - compute_logits(peer, tokens)[-1]).max() < 1e-4


def test_a_whole_context_and_no_more(saved, llama):
    tokens = RNG.integers(1, 96, 120).tolist()
    assert llama.generate(tokens, 8).tokens == generate(saved["llama"][0], tokens, 8)
    with pytest.raises(ArgumentError, match="longer than the model's context"):
        llama.generate(tokens, 9)


def test_bad_tokens(llama):
    for tokens, error in (([1, 96], OutOfBoundsError), ([-1], OutOfBoundsError), ([[]], ArgumentError),
                          ([1.5], ArgumentError), ("text", ArgumentError)):  # fmt: skip
        with pytest.raises(error):
            llama.generate(tokens)
    with pytest.raises(ArgumentError, match="no list of tokens"):
        llama.logits([[1, 2], [3]])
    with pytest.raises(ArgumentError, match="one sampling for each"):
        llama.generate([[1], [2]], sampling=[Sampling()])
    with pytest.raises(ArgumentError, match="max_tokens"):
        llama.generate([1], max_tokens=0)


STEPS = (
    ([[99]], [1], OutOfBoundsError), ([[1]], [2], ShapeError), ([[1], [2]], [1, 1], ShapeError),
    ([[1]], [-1], ShapeError), ([1, 2], [1], ShapeError), ([1], [2], ShapeError), ([99], [1], OutOfBoundsError),
    ([[[1]]], [1], ShapeError),
)  # fmt: skip


def test_misuse_of_sessions(interpreted):
    session = interpreted.new_session(1, 8)
    for tokens, count, error in STEPS:
        with pytest.raises(error):
            session.run_step(np.array(tokens), np.array(count))
    assert session.run_step(np.array([[1]]), np.array([1])).shape == (1, 96)  # nothing was lost


def test_tokens_of_one_axis_are_one_for_each_request(interpreted):
    plain, column, held = (interpreted.new_session(2, 8) for _ in range(3))
    ones, tokens = np.ones(2, np.int32), np.array([3, 5])
    found = [
        plain.run_step(tokens, ones),
        column.run_step(tokens[:, None], ones),
        held.run_step(ts.tensor(tokens), ones),
    ]
    assert found[0].shape == (2, 96) and [s.past.tolist() for s in (plain, column, held)] == [[1, 1]] * 3
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].numpy(), other.numpy())


def test_misuse_of_models(llama):
    weights = {**llama.weights, "layers": llama.weights["layers"][:1]}
    for call in (
        lambda: llama.generate(None), lambda: llama.generate(3), lambda: llama.generate([1], 2, draft=3),
        lambda: LanguageModel(llama.config, weights), lambda: llama.generate([1], 2, "greedy"),
        lambda: llama.generate([1], 2, draft=llama, proposals=0), lambda: replace(llama.config, rotary="x"),
        lambda: replace(llama.config, eps=float("nan")), lambda: replace(llama.config, head_size=7),
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            call()
    for held, text in (
        ({n: w for n, w in llama.weights.items() if n != "norm"}, "have no norm"),
        (3, "have no embedding, norm, layers"),
        ({**llama.weights, "layers": [{}] * llama.config.layers}, r"have no layers\.0\.attention_norm"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=text):
            LanguageModel(llama.config, held)
    with pytest.raises(DTypeError, match="holds floats"):
        LanguageModel(llama.config, llama.weights, cache_dtype="int8")


WRONG = (("temperature", -1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1),
         ("top_k", 2.0), ("seed", "a"))  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_sampling_out_of_range(field, value):
    with pytest.raises(ArgumentError, match=field) as found:
        Sampling(**{field: value})
    assert found.value.location.file == __file__


def test_the_cache_is_not_written_past_its_end(interpreted):
    session = interpreted.new_session(1, 4)
    session.prefill([np.array([1, 2, 3])])
    session.run_step(np.array([[4]]), np.array([1]))
    with pytest.raises(ArgumentError, match="past its end"):
        session.run_step(np.array([[4]]), np.array([1]))
    pool = PagePool(pages=2, size=2, requests=2, longest=8)
    pool.reserve(0, 3)
    with pytest.raises(ResourceError, match="no pages left for request 1"):
        pool.reserve(1, 1)
    pool.release(0)
    pool.reserve(1, 4)
    assert pool.free == 0


@pytest.mark.parametrize("change", ["truncated", "missing", "extra", "shape", "config", "no file"])
def test_broken_folders_name_what_is_wrong(saved, tmp_path, change):
    import safetensors.torch
    import torch

    state = {n: t.contiguous() for n, t in saved["llama"][0].state_dict().items()}
    name = "model.layers.1.mlp.up_proj.weight"
    config = json.loads((saved["llama"][1] / "config.json").read_text())
    if change == "missing":
        del state[name]
    if change == "extra":
        state["model.layers.1.mlp.extra.weight"] = torch.zeros(3)
    if change == "shape":
        state[name] = state[name][:-1].contiguous()
    if change == "config":
        config["model_type"] = "bert"
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = safetensors.torch.save(state)
    if change != "no file":
        (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2] if change == "truncated" else data)
    expected = {
        "truncated": (FileError, "not a complete"), "missing": (FileError, r"layers\.1\.up\.weight"),
        "extra": (FileError, "does not use"), "shape": (ShapeError, r"layers\.1\.up\.weight \(model\.layers\.1\.mlp"),
        "config": (ArgumentError, "bert"), "no file": (FileError, "model.safetensors"),
    }[change]  # fmt: skip
    with pytest.raises(expected[0], match=expected[1]):
        load(tmp_path)


def test_configurations_that_are_refused():
    good = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 8}  # fmt: skip
    assert read_config(good).kv_heads == 2
    for change in ({"hidden_act": "gelu"}, {"rope_scaling": {"rope_type": "yarn"}}, {"vocab_size": None},
                   {"num_key_value_heads": 3}, {"hidden_size": 0}):  # fmt: skip
        with pytest.raises(ArgumentError):
            read_config({**good, **change})
