"""Whole models by one call: GPT-2 (Radford et al. 2019), with choices of precision, attention and compilation.

`tessera.llm` loads published weights and generates text; the models here are modules, to train and to change.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, ShapeError, user_location
from tessera.core.types import bool_, f32
from tessera.frontend.jit.tracing import Jit
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn import initialisation as init
from tessera.nn.containers import ModuleList
from tessera.nn.linear import Embedding, check_count
from tessera.nn.module import Module, Parameter
from tessera.nn.normalisation import LayerNorm
from tessera.nn.pooling import Dropout
from tessera.nn.positions import LearnedPositions
from tessera.nn.transformer import TransformerEncoderLayer
from tessera.ops.tensor.basic import full
from tessera.ops.tensor.contractions import matmul
from tessera.ops.tensor.matrices import swapaxes
from tessera.ops.tensor.nn import gelu
from tessera.transforms.policies import precision as compute_in

ATTENTION = ("flash2", "standard")
COMPILE_MODES = (None, "optimize", "tune")
STD = 0.02  # of the published model's first weights


def _activate(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


class GPT2(Module):
    """GPT-2: logits [B, S, vocabulary] of the next token for tokens [B, S]; the first weights are random.

    Without options it has the sizes of the smallest published model (124 million parameters). `precision` is what
    `ts.precision` takes, as "mixed". `attention` "flash2" stores no scores, "standard" does. `compile_mode` "optimize"
    compiles the forward pass, as `ts.jit` does, and "tune" measures schedules first. The logits are products with the
    table of embeddings.

    >>> model = GPT2(vocabulary=100, context=16, width=8, layers=1, heads=2)
    >>> model(np.zeros((2, 5), np.int64)).shape
    (2, 5, 100)

    Raises:
        ArgumentError: a size or an option is none.
        ShapeError: tokens are no matrix, or more than `context` in a row.
    """

    def __init__(
        self, vocabulary: int = 50257, context: int = 1024, width: int = 768, layers: int = 12, heads: int = 12,
        dropout: float = 0.0, *, precision: Any = None, attention: str = "flash2", compile_mode: str | None = None,
        dtype: Any = f32,
    ) -> None:  # fmt: skip
        _check_choice("attention", attention, ATTENTION)
        _check_choice("compile_mode", compile_mode, COMPILE_MODES)
        self.precision, self.attention, self.compile_mode = precision, attention, compile_mode
        self.embedding = Embedding(vocabulary, width, dtype=dtype)
        self.positions = LearnedPositions(context, width, dtype=dtype)
        self.dropout = Dropout(dropout)
        count = check_count("layers", layers)
        self.blocks = ModuleList([_make_block(width, heads, dropout, dtype, STD / math.sqrt(2 * count))
                                  for _ in range(count)])  # fmt: skip
        self.norm = LayerNorm(width, dtype=dtype)
        _draw(self.embedding, STD)

    def forward(self, tokens: Any) -> Tensor:
        """The logits."""
        tokens = as_tensor(tokens)
        if tokens.ndim != 2:
            raise ShapeError("tokens are [batch, positions]", location=user_location(), received=str(tokens.type))
        if self.compile_mode is None:
            return self.compute(tokens)
        return (_OPTIMIZED if self.compile_mode == "optimize" else _TUNED)(self, tokens)

    def compute(self, tokens: Tensor) -> Tensor:
        """The logits, op by op or in the trace of the caller."""
        with nullcontext() if self.precision is None else compute_in(self.precision):
            x = self.dropout(self.positions(self.embedding(tokens)))
            named: dict[str, Any] = {"is_causal": True}
            if self.attention == "standard":
                size = tokens.shape[1]
                named = {"src_mask": Tensor(np.triu(np.ones((size, size), bool_.numpy), 1))}
            for block in self.blocks:
                x = block(x, **named)
            return matmul(self.norm(x), swapaxes(self.embedding.weight, 0, 1))


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        raise ArgumentError(f"{name} is {value!r}", location=user_location(), expected=", ".join(map(repr, known)))


def _make_block(width: int, heads: int, dropout: float, dtype: Any, last: float) -> TransformerEncoderLayer:
    """A block; the standard deviation of the weights before its residuals is `last`, that of the others `STD`."""
    made = TransformerEncoderLayer(
        width, heads, 4 * width, dropout, _activate, batch_first=True, norm_first=True, dtype=dtype
    )
    for module, std in ((made.self_attn.out_proj, last), (made.linear1, STD), (made.linear2, last)):
        _draw(module, std)
    _draw(made.self_attn, STD, "in_proj_")
    return made


def _draw(module: Module, std: float, prefix: str = "") -> None:
    """Draw a module's weight anew, and set its bias to 0."""
    weight, bias = (getattr(module, prefix + name, None) for name in ("weight", "bias"))
    setattr(module, prefix + "weight", Parameter(init.normal(weight.shape, std=std, dtype=weight.dtype)))  # type: ignore[union-attr]
    if bias is not None:
        setattr(module, prefix + "bias", Parameter(full(shape=bias.shape, value=0.0, dtype=bias.dtype)))


_OPTIMIZED = Jit(lambda model, tokens: model.compute(tokens))
_TUNED = Jit(lambda model, tokens: model.compute(tokens), tune=True)
