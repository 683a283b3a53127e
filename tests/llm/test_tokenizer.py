"""Tokenizers of GGUF files against SentencePiece (tests/fixtures/sentencepiece.json: its pieces, scores and tokens)."""

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
from tessera.errors import FileError  # noqa: E402
from tessera.llm.tokenizer import read_gguf_tokenizer  # noqa: E402

KNOWN = json.loads((Path(__file__).parents[1] / "fixtures" / "sentencepiece.json").read_text())
PIECES = KNOWN["pieces"]
FIELDS = {
    "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": PIECES, "tokenizer.ggml.scores": KNOWN["scores"],
    "tokenizer.ggml.token_type": KNOWN["kinds"],
}  # fmt: skip
BEGIN, START = PIECES.index("<s>"), PIECES.index("<|im_start|>")


@pytest.mark.parametrize(("text", "tokens"), KNOWN["texts"])
def test_tokens_are_those_of_sentencepiece(text, tokens):
    tokenizer = read_gguf_tokenizer(FIELDS)
    assert tokenizer.encode(text) == tokens
    if "\u2581" not in text:
        assert tokenizer.decode(tokens) == text


def test_control_tokens_and_the_beginning_of_a_text():
    hello = dict(KNOWN["texts"])["Hello world"]
    plain, begun = (read_gguf_tokenizer({**FIELDS, "tokenizer.ggml.bos_token_id": BEGIN,
                                         "tokenizer.ggml.add_bos_token": b}) for b in (False, True))  # fmt: skip
    for name, want in (("", hello), ("<s>", [BEGIN, *hello]), ("<s><|im_start|>", [BEGIN, START, *hello])):
        assert plain.encode(name + "Hello world") == want
        assert begun.encode(name + "Hello world") == (want if want[0] == BEGIN else [BEGIN, *want])
        assert plain.decode(want) == "Hello world"
    assert (plain.encode(""), begun.encode("")) == ([], [BEGIN])
    assert plain.encode("Hello world<|im_start|>Hello world<s>") == [*hello, START, *hello, BEGIN]
    bare = read_gguf_tokenizer({**FIELDS, "tokenizer.ggml.add_space_prefix": False})
    assert bare.encode(" Hello world") == hello and bare.decode(hello) == " Hello world"


@pytest.mark.parametrize(("change", "text"), [
    ({"tokenizer.ggml.scores": KNOWN["scores"][:-1]}, "scores: 699"),
    ({"tokenizer.ggml.scores": None}, "scores: 0"),
    ({"tokenizer.ggml.token_type": [1]}, "token_type: 1"),
    ({"tokenizer.ggml.tokens": []}, "tokens: 0"),
    ({"tokenizer.ggml.model": "gpt2"}, "merges: 0"),
    ({"tokenizer.ggml.model": "rwkv"}, "rwkv"),
    ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "other"}, "split as other"),
])  # fmt: skip
def test_fields_that_do_not_fit(change, text):
    with pytest.raises(FileError, match=text):
        read_gguf_tokenizer({**FIELDS, **change})
