"""Tokenizer: text to token numbers and back, from the fields of a GGUF file or a tokenizer.json (`tokenizers`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError, user_location

# The types of tokens that differ from others: for text that no token spells, for no text (such as its end), and tokens
# that are taken whole wherever they occur.
UNKNOWN, CONTROL, WHOLE = 2, 3, 4
SPACE = "\u2581"  # what SentencePiece writes for a space
# How text is split before byte pairs are merged, by the name in the field "tokenizer.ggml.pre".
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_WORDS = _QWEN_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")
SPLITS: dict[str, str | None] = {
    "gpt-2": None, "default": None, "smollm": None, "qwen2": _QWEN_WORDS, "llama-bpe": _LLAMA_WORDS,
}  # fmt: skip


class Tokenizer:
    """Text to token numbers and back.

    `chat_template` is the model's template of a conversation in Jinja, or None; `special` are the control tokens by
    name. `begins` says whether every text begins with the token `bos_token`. `prepare` makes of a text what `inner`
    encodes.
    """

    def __init__(
        self, inner: Any, chat_template: str | None = None, special: Mapping[str, int] | None = None,
        begins: bool = False, prepare: Callable[[str], str] = str,
    ) -> None:  # fmt: skip
        self.inner, self.chat_template, self.special = inner, chat_template, dict(special or {})
        self._begin, self._prepare = [self.special["bos_token"]] if begins else [], prepare

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; names of control tokens in it become those tokens.

        A model whose texts begin with a token of their own gets it, unless the text names it first.

        Raises:
            ArgumentError: `text` is no string.
        """
        if not isinstance(text, str):
            raise ArgumentError("a text is not a string", location=user_location(), received=type(text).__name__)
        found = list(self.inner.encode(self._prepare(text), add_special_tokens=False).ids)
        return found if found[:1] == self._begin else self._begin + found

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens, without control tokens; incomplete characters become the replacement character."""
        return str(self.inner.decode([int(t) for t in tokens], skip_special_tokens=True))

    def format_chat(self, messages: Sequence[Mapping[str, str]] | str) -> str:
        """A conversation as the text that the model continues with its answer; a string is one message of the user.

        Raises:
            ArgumentError: the model has no template, or a message lacks its role or content.
            DeviceUnavailable: the package `jinja2` is not installed.
        """
        if not isinstance(messages, (str, list, tuple)):
            raise ArgumentError("a conversation is neither text nor a list of messages", location=user_location(),
                                received=type(messages).__name__)  # fmt: skip
        listed = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        if self.chat_template is None:
            raise ArgumentError("the model has no chat template", location=user_location(),
                                suggestion="generate from plain text")  # fmt: skip
        for message in listed:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise ArgumentError("a message lacks its role or content", location=user_location(),
                                    expected='{"role": "user", "content": "..."}', received=repr(message))  # fmt: skip
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise DeviceUnavailable("the package jinja2 is not installed", location=user_location(),
                                    suggestion="pip install tessera[llm]") from error  # fmt: skip
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        names = {name: self._text_of(name) for name in ("bos_token", "eos_token")}
        return str(environment.from_string(self.chat_template).render(
            messages=listed, add_generation_prompt=True, **names))  # fmt: skip

    def _text_of(self, name: str) -> str:
        number = self.special.get(name)
        return "" if number is None else str(self.inner.id_to_token(number))


def read_gguf_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in the fields of a GGUF file: byte pairs (GPT-2's kind), or SentencePiece's pairs (Llama's kind).

    Raises:
        DeviceUnavailable: the package `tokenizers` is not installed.
        FileError: the file has no tokenizer, one of another kind, or one whose fields do not fit.
    """
    tokenizers = _import_tokenizers()
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and split not in SPLITS):
        raise FileError(
            "the tokenizer of the file is not supported", location=user_location(),
            expected=f"byte pairs (gpt2), split as {', '.join(SPLITS)}, or SentencePiece's (llama)",
            received=f"{kind}, split as {split}", suggestion="pass the tokenizer.json of the model: tokenizer=...",
        )  # fmt: skip
    _check_fields(fields, "merges" if kind == "gpt2" else "scores")
    names, kinds = fields["tokenizer.ggml.tokens"], fields.get("tokenizer.ggml.token_type") or []
    inner = _make_byte_pairs(tokenizers, fields, split) if kind == "gpt2" else _make_sentence_pieces(tokenizers, fields)
    control = [names[i] for i, k in enumerate(kinds) if k == CONTROL]
    inner.add_special_tokens([tokenizers.AddedToken(n, normalized=False, special=True) for n in control])
    whole = [names[i] for i, k in enumerate(kinds) if k == WHOLE]
    inner.add_tokens([tokenizers.AddedToken(n, normalized=False, special=False) for n in whole])
    given = {f"{n}_token": fields.get(f"tokenizer.ggml.{n}_token_id") for n in ("bos", "eos")}
    special = {n: int(t) for n, t in given.items() if t is not None}
    begins = bool(fields.get("tokenizer.ggml.add_bos_token", kind == "llama")) and "bos_token" in special
    spaced = kind == "llama" and fields.get("tokenizer.ggml.add_space_prefix", True)
    prepare = _make_space_prefix(control) if spaced else str
    return Tokenizer(inner, fields.get("tokenizer.chat_template"), special, begins, prepare)


def _check_fields(fields: Mapping[str, Any], needed: str) -> None:
    """Raise the error of a tokenizer that lacks its merges or scores, or whose lists are not as long as its tokens."""
    count = len(fields.get("tokenizer.ggml.tokens") or ())
    lengths = {n: len(fields.get(f"tokenizer.ggml.{n}") or ()) for n in (needed, "token_type")}
    wrong = [n for n, have in lengths.items() if n != "merges" and have and have != count]
    if not count or not lengths[needed] or wrong:
        raise FileError(
            "the tokenizer of the file lacks a field, or its lists differ in length", location=user_location(),
            expected=f"tokenizer.ggml.tokens and tokenizer.ggml.{needed}",
            received=", ".join(f"{n}: {have}" for n, have in {"tokens": count, **lengths}.items()),
        )  # fmt: skip


def _make_byte_pairs(tokenizers: Any, fields: Mapping[str, Any], split: str) -> Any:
    """Byte pairs: the merges are in the file, in their order."""
    merges = [tuple(m.split(" ", 1)) for m in fields["tokenizer.ggml.merges"]]
    model = tokenizers.models.BPE(vocab=_number(fields), merges=merges)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer, inner.decoder = _make_splitter(tokenizers, split), tokenizers.decoders.ByteLevel()
    return inner


def _make_sentence_pieces(tokenizers: Any, fields: Mapping[str, Any]) -> Any:
    """SentencePiece's pairs (Kudo and Richardson 2018): two pieces merge if together they are one, best score first.

    Characters that are no piece become the pieces of their bytes.
    """
    vocabulary, names = _number(fields), fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(names)
    merges = []
    for name, score, kind in zip(names, fields["tokenizer.ggml.scores"], kinds, strict=True):
        if kind == 1:
            cuts = ((name[:i], name[i:]) for i in range(1, len(name)))
            merges += [(-score, vocabulary[a], vocabulary[b], a, b) for a, b in cuts if {a, b} <= vocabulary.keys()]
    pairs = [(a, b) for *_, a, b in sorted(merges)]
    unknown = next((n for n, kind in zip(names, kinds, strict=True) if kind == UNKNOWN), None)
    model = tokenizers.models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    inner, decoders = tokenizers.Tokenizer(model), tokenizers.decoders
    inner.normalizer = tokenizers.normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.get("tokenizer.ggml.add_space_prefix", True):
        steps.append(decoders.Strip(" ", 1, 0))
    inner.decoder = decoders.Sequence(steps)
    return inner


def _number(fields: Mapping[str, Any]) -> dict[str, int]:
    return {name: i for i, name in enumerate(fields["tokenizer.ggml.tokens"])}


def _make_space_prefix(control: Sequence[str]) -> Callable[[str], str]:
    """What puts a space before a text, and before the text after each control token, as SentencePiece does."""
    names = "|".join(re.escape(n) for n in sorted(control, key=len, reverse=True))
    places = re.compile(f"({names})(?!{names}|$)" if names else "(?!)", re.DOTALL)
    at_start = re.compile(names) if names else None

    def prepare(text: str) -> str:
        spaced = places.sub(r"\1 ", text)
        return spaced if not text or (at_start and at_start.match(text)) else " " + spaced

    return prepare


def _make_splitter(tokenizers: Any, split: str) -> Any:
    pre = tokenizers.pre_tokenizers
    if split == "smollm":
        return pre.Sequence([pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)])
    if SPLITS[split] is None:
        return pre.ByteLevel(add_prefix_space=False)
    words = pre.Split(tokenizers.Regex(SPLITS[split]), behavior="isolated", invert=False)
    return pre.Sequence([words, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


def read_tokenizer(path: str | Path, chat_template: str | None = None) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
        DeviceUnavailable: the package `tokenizers` is not installed.
        FileError: the file is missing, or not readable.
    """
    tokenizers, path = _import_tokenizers(), Path(path)
    if not path.is_file():
        raise FileError(f"there is no file {path.name}", location=user_location(), expected=str(path))
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(path)), chat_template)
    except Exception as error:  # the library raises bare Exception for a bad file
        raise FileError(f"{path.name} is not readable", location=user_location(), received=str(error)) from error


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DeviceUnavailable("the package tokenizers is not installed", location=user_location(),
                                suggestion="pip install tessera[llm]") from error  # fmt: skip
    return tokenizers
