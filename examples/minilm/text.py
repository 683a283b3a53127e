"""Text to token ids for MiniLM, plus the demo's sentences and queries.

The package's tokenizer.json carries truncation and padding to 128 of its own; `encode` sets both
explicitly, so the length asked for is the length returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.minilm.weights import REINSTALL, model_file
from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError

HERE = Path(__file__).parent
LONGEST = 512  # the rows of the position table


def lines(name: str) -> list[str]:
    """The non-empty lines of a text file beside this module, e.g. "sentences.txt"."""
    path = HERE / name
    if not path.is_file():
        raise FileError(f"the demo's {name} is missing", expected=str(path), suggestion="git checkout that file")
    return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def tokenizer(length: int) -> Any:
    """The package's WordPiece tokenizer, cutting and padding every text to `length` tokens."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise DeviceUnavailable(
            "the tokenizers library is not installed", suggestion="pip install tokenizers"
        ) from error
    path = model_file("tokenizer.json")
    try:
        made = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for a bad file
        raise FileError(f"{path.name} is not readable", received=str(error), suggestion=REINSTALL) from error
    made.enable_truncation(max_length=length)
    made.enable_padding(length=length, pad_id=0, pad_token="[PAD]")
    return made


def encode(sentences: Sequence[str], length: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and the mask of real tokens, both int32 [N, length]."""
    if isinstance(sentences, str):
        raise ArgumentError("encode takes a list of sentences", received="one string", suggestion="[sentence]")
    if not 3 <= length <= LONGEST:
        raise ArgumentError("bad sequence length", expected=f"3 to {LONGEST}", received=length)
    if not sentences:
        return np.zeros((0, length), np.int32), np.zeros((0, length), np.int32)
    made = tokenizer(length).encode_batch(list(sentences))
    ids = np.array([one.ids for one in made], dtype=np.int32)
    return ids, np.array([one.attention_mask for one in made], dtype=np.int32)
