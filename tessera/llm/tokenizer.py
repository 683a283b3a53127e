"""Tokenizer: text to token numbers and back, from the fields of a GGUF file or a tokenizer.json (`tokenizers`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError, user_location

CONTROL = 3  # the type of a token that stands for no text, such as the end of a text
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
    name.
    """

    def __init__(self, inner: Any, chat_template: str | None = None, special: Mapping[str, int] | None = None) -> None:
        self.inner, self.chat_template, self.special = inner, chat_template, dict(special or {})

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; names of control tokens in it become those tokens.

        Raises:
            ArgumentError: `text` is no string.
        """
        if not isinstance(text, str):
            raise ArgumentError("a text is not a string", location=user_location(), received=type(text).__name__)
        return list(self.inner.encode(text, add_special_tokens=False).ids)

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
    """The tokenizer in the fields of a GGUF file: byte pairs (GPT-2's kind).

    Raises:
        DeviceUnavailable: the package `tokenizers` is not installed.
        FileError: the file has no tokenizer, or one of another kind.
    """
    tokenizers = _import_tokenizers()
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or split not in SPLITS:
        raise FileError(
            "the tokenizer of the file is not supported", location=user_location(),
            expected=f"byte pairs (gpt2), split as {', '.join(SPLITS)}", received=f"{kind}, split as {split}",
            suggestion="pass the tokenizer.json of the model: tokenizer=...",
        )  # fmt: skip
    names = fields["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in fields["tokenizer.ggml.merges"]]
    model = tokenizers.models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=merges)
    inner = tokenizers.Tokenizer(model)
    inner.pre_tokenizer, inner.decoder = _make_splitter(tokenizers, split), tokenizers.decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type") or []
    control = [names[i] for i, k in enumerate(kinds) if k == CONTROL]
    inner.add_special_tokens([tokenizers.AddedToken(n, normalized=False, special=True) for n in control])
    special = {f"{n}_token": fields.get(f"tokenizer.ggml.{n}_token_id") for n in ("bos", "eos")}
    return Tokenizer(inner, fields.get("tokenizer.chat_template"), {n: t for n, t in special.items() if t is not None})


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
