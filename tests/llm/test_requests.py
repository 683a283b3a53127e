"""Prompts, samplings and stop strings of a call, as a user of transformers would write them."""

import numpy as np
import pytest

import tessera as ts

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from tessera.core.errors import ArgumentError  # noqa: E402
from tessera.llm import Completion, LanguageModel, Sampling, Tokenizer, load  # noqa: E402
from tests.llm.peers import make_peer  # noqa: E402

PROMPTS = ["abc", "the sea", "x"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A llama of transformers with a tokenizer of characters, and ours from its folder, without machine code."""
    model = tokenizers.models.BPE(vocab={chr(32 + i): i for i in range(95)} | {"<end>": 95}, merges=[])
    inner, folder = tokenizers.Tokenizer(model), tmp_path_factory.mktemp("model")
    inner.decoder = tokenizers.decoders.Fuse()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    peer = make_peer("llama")
    peer.config.eos_token_id = peer.generation_config.eos_token_id = 95
    for each in (peer, theirs):
        each.save_pretrained(folder)
    return peer, theirs, load(folder, target="interp")


def continue_with(peer, theirs, prompt, count, **named):
    tokens = theirs(prompt, return_tensors="pt")
    tokens.pop("token_type_ids", None)
    out = peer.generate(**tokens, max_new_tokens=count, do_sample=False, pad_token_id=95, **named)
    return out[0, len(prompt) :].tolist()


def test_stop_strings_are_those_of_transformers(pair):
    peer, theirs, model = pair
    free = [continue_with(peer, theirs, p, 12) for p in PROMPTS]
    stops = [theirs.decode(free[0][:1]), theirs.decode(free[1][4:7])]  # the first request ends at once
    want = [continue_with(peer, theirs, p, 12, stop_strings=stops, tokenizer=theirs) for p in PROMPTS]
    assert len(want[0]) == 1 and 1 < len(want[1]) < 12
    for draft in (None, model):
        found = model.generate(PROMPTS, 12, stop=stops, draft=draft)
        assert [c.tokens for c in found] == want
        for c in found:
            assert (c.reason == "stop") == (len(c.tokens) < 12)
            assert not any(s in c.text for s in stops) and theirs.decode(c.tokens).startswith(c.text)
    assert model.generate(PROMPTS[0], 12, stop=stops[0]) == Completion(want[0], "", "stop")
    assert [t for _, t in model.stream(PROMPTS[1], 12, stop=stops)] == want[1]


def test_temperature_zero_and_sizes_of_numpy(pair):
    peer, theirs, model = pair
    want = continue_with(peer, theirs, PROMPTS[1], 5)
    assert model.generate(PROMPTS[1], np.int64(5), Sampling(temperature=0, top_k=3, seed=9)).tokens == want
    assert model.generate(np.array(theirs(PROMPTS[1]).input_ids), 5).tokens == want
    assert model.generate([], 5) == []


OTHERS = (
    ({"temperature": 0.7}, r"sampling=ts\.llm\.Sampling\(temperature="), ({"max_new_tokens": 3}, "max_tokens="),
    ({"stop_strings": ["a"]}, "write stop="), ({"num_beams": 2}, "no argument num_beams"),
)  # fmt: skip


@pytest.mark.parametrize(("named", "text"), OTHERS)
def test_arguments_of_other_libraries(pair, named, text):
    for call in (pair[2].generate, pair[2].stream, pair[2].chat):
        with pytest.raises(ArgumentError, match=text) as found:
            call("a", **named)
        assert found.value.location.file == __file__


def test_misuse(pair):
    model = pair[2]
    silent = LanguageModel(model.config, model.weights, target="interp")
    chat = Tokenizer(model.tokenizer.inner, "{{ messages }}")
    for call, text in (
        (lambda: model.generate(""), "prompt 0 is empty"), (lambda: model.stream(["a", ""]), "prompt 1 is empty"),
        (lambda: model.generate("a" * 129), "longer than the model's context"), (lambda: model.stream(3), "neither"),
        (lambda: model.generate("a", True), "max_tokens"), (lambda: model.generate("a", 2, None), "no Sampling"),
        (lambda: model.generate(["a", "b"], 2, [Sampling(), {"temperature": 1}]), "no Sampling"),
        (lambda: model.generate("a", 2, stop=""), "no stop string"),
        (lambda: silent.stream([1], stop="a"), "tokenizer"),
        (lambda: model.generate("a", 2, stop=["b", 3]), "no stop string"), (lambda: chat.format_chat(None), "neither"),
        (lambda: chat.format_chat([3]), "lacks its role"), (lambda: ts.llm.load(3), "not a path"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=text) as found:
            call()
        assert found.value.location.file == __file__
