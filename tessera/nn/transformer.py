"""Transformer blocks: encoder and decoder layers with PyTorch's weights, and a pre-norm decoder block."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from tessera.core.errors import ArgumentError, user_location
from tessera.core.pytree import flatten
from tessera.core.types import f32
from tessera.ir.tensor import Tensor, as_tensor
from tessera.nn.activations import relu
from tessera.nn.attention import GroupedQueryAttention, MultiheadAttention
from tessera.nn.containers import ModuleList
from tessera.nn.linear import Linear, check_count
from tessera.nn.module import Module, check_module
from tessera.nn.normalisation import LayerNorm, RMSNorm
from tessera.nn.pooling import Dropout
from tessera.ops.api.creation import full
from tessera.ops.tensor import nn
from tessera.ops.tensor import shape as shapes
from tessera.ops.tensor.rearrange import triu
from tessera.transforms.autodiff.custom_rules import checkpoint
from tessera.transforms.flow.control_flow import scan

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {"relu": relu, "gelu": nn.gelu, "silu": nn.silu}


def find_activation(activation: Any) -> Callable[..., Tensor]:
    """An activation by name, or a function.

    Raises:
        ArgumentError: there is no such activation.
    """
    if callable(activation):
        return activation  # type: ignore[no-any-return]
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation is {activation!r}", location=user_location(), expected=", ".join(ACTIVATIONS))
    return ACTIVATIONS[activation]


class TransformerEncoderLayer(Module):
    """Self-attention and a feed-forward network, each with a residual and a layer norm (Vaswani et al. 2017).

    Weights and options are those of `torch.nn.TransformerEncoderLayer`; inputs are [S, N, E], or [N, S, E] with
    `batch_first`.

    >>> from tessera.ops.api.creation import zeros
    >>> TransformerEncoderLayer(8, 2, 16)(zeros((3, 1, 8))).shape
    (3, 1, 8)
    """

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1, activation: Any = "relu",
        layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False, bias: bool = True,
        dtype: Any = f32,
    ) -> None:  # fmt: skip
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, dtype=dtype)
        self.linear1 = Linear(d_model, dim_feedforward, bias, dtype=dtype)
        self.linear2 = Linear(dim_feedforward, d_model, bias, dtype=dtype)
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype)
        self.dropout, self.dropout1, self.dropout2 = Dropout(dropout), Dropout(dropout), Dropout(dropout)
        self.activation, self.norm_first = find_activation(activation), norm_first

    def forward(
        self, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        """The encoded sequence."""
        x = as_tensor(src)

        def attend(x: Tensor) -> Tensor:
            return self.dropout1(
                self.self_attn(x, key_padding_mask=src_key_padding_mask, attn_mask=src_mask, is_causal=is_causal)
            )

        if self.norm_first:
            x = x + attend(self.norm1(x))
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + attend(x))
        return self.norm2(x + self._feed_forward(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))


class TransformerDecoderLayer(Module):
    """Self-attention, attention to a memory and a feed-forward network, each with a residual and a layer norm.

    Weights and options are those of `torch.nn.TransformerDecoderLayer`.

    >>> from tessera.ops.api.creation import zeros
    >>> TransformerDecoderLayer(8, 2, 16)(zeros((3, 1, 8)), zeros((5, 1, 8))).shape
    (3, 1, 8)
    """

    def __init__(
        self, d_model: int, nhead: int, dim_feedforward: int = 2048, dropout: float = 0.1, activation: Any = "relu",
        layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False, bias: bool = True,
        dtype: Any = f32,
    ) -> None:  # fmt: skip
        self.self_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, dtype=dtype)
        self.multihead_attn = MultiheadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, dtype=dtype)
        self.linear1 = Linear(d_model, dim_feedforward, bias, dtype=dtype)
        self.linear2 = Linear(dim_feedforward, d_model, bias, dtype=dtype)
        for i in (1, 2, 3):
            setattr(self, f"norm{i}", LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype))
            setattr(self, f"dropout{i}", Dropout(dropout))
        self.dropout = Dropout(dropout)
        self.activation, self.norm_first = find_activation(activation), norm_first

    def forward(
        self, tgt: Any, memory: Any, tgt_mask: Any = None, memory_mask: Any = None, tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None, tgt_is_causal: bool = False, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """The decoded sequence."""
        x, memory = as_tensor(tgt), as_tensor(memory)

        def attend(x: Tensor) -> Tensor:
            named = {"key_padding_mask": tgt_key_padding_mask, "attn_mask": tgt_mask, "is_causal": tgt_is_causal}
            return self.dropout1(self.self_attn(x, **named))

        def look(x: Tensor) -> Tensor:
            named = {
                "key_padding_mask": memory_key_padding_mask, "attn_mask": memory_mask, "is_causal": memory_is_causal
            }  # fmt: skip
            return self.dropout2(self.multihead_attn(x, memory, memory, **named))

        def feed(x: Tensor) -> Tensor:
            return self.dropout3(self.linear2(self.dropout(self.activation(self.linear1(x)))))

        for step, norm in ((attend, self.norm1), (look, self.norm2), (feed, self.norm3)):
            x = x + step(norm(x)) if self.norm_first else norm(x + step(x))
        return x


class DecoderBlock(Module):
    """A pre-norm block of a decoder-only model as Llama has it: RMS norm, attention with rotary positions, SwiGLU.

    >>> from tessera.ops.api.creation import zeros
    >>> DecoderBlock(8, 2, hidden=16)(zeros((1, 3, 8))).shape
    (1, 3, 8)
    """

    def __init__(
        self, embed_dim: int, num_heads: int, kv_heads: int | None = None, hidden: int | None = None,
        eps: float = 1e-6, rope_base: float = 10000.0, dropout: float = 0.0, dtype: Any = f32,
    ) -> None:  # fmt: skip
        hidden = 4 * embed_dim if hidden is None else hidden
        self.norm1 = RMSNorm(embed_dim, eps, dtype=dtype)
        self.attention = GroupedQueryAttention(
            embed_dim, num_heads, kv_heads, rope_base=rope_base, dropout=dropout, dtype=dtype
        )
        self.norm2 = RMSNorm(embed_dim, eps, dtype=dtype)
        self.gate = Linear(embed_dim, hidden, bias=False, dtype=dtype)
        self.up = Linear(embed_dim, hidden, bias=False, dtype=dtype)
        self.down = Linear(hidden, embed_dim, bias=False, dtype=dtype)

    def forward(self, x: Any, offset: Any = 0) -> Tensor:
        """The sequence [N, S, E] after the block."""
        x = as_tensor(x)
        x = x + self.attention(self.norm1(x), offset=offset)
        inner = self.norm2(x)
        return x + self.down(nn.silu(self.gate(inner)) * self.up(inner))


class TransformerEncoder(Module):
    """A stack of layers, each called with the same masks; then `norm` if given.

    It takes a list of layers, or one layer and a number of copies of it, as PyTorch does.

    >>> from tessera.ops.api.creation import zeros
    >>> TransformerEncoder(TransformerEncoderLayer(8, 2, 16), 2)(zeros((3, 1, 8))).shape
    (3, 1, 8)

    Raises:
        ArgumentError: there is one layer and no number of copies, or a list and a number.
    """

    def __init__(self, layers: Any, num_layers: Any = None, norm: Module | None = None) -> None:
        if isinstance(num_layers, Module):
            num_layers, norm = None, num_layers
        if isinstance(layers, Module) and not isinstance(layers, ModuleList):
            layers = [copy.deepcopy(layers) for _ in range(check_count("num_layers", num_layers))]
        elif num_layers is not None:
            raise ArgumentError(
                "a list of layers and a number of copies", location=user_location(),
                received=f"num_layers={num_layers}", expected="one layer with num_layers, or a list of layers",
            )  # fmt: skip
        self.layers = ModuleList(layers)
        self.norm = norm

    def forward(self, x: Any, *args: Any, **named: Any) -> Tensor:
        """The sequence after all layers."""
        masks = {"mask": "src_mask"}
        named = {masks.get(name, name) if type(self) is TransformerEncoder else name: v for name, v in named.items()}
        for layer in self.layers:
            x = layer(x, *args, **named)
        return x if self.norm is None else self.norm(x)


class TransformerDecoder(TransformerEncoder):
    """A stack of decoder layers: `decoder(tgt, memory)`; see `TransformerEncoder`."""


class Transformer(Module):
    """An encoder and a decoder with layer norms at their ends (Vaswani et al. 2017): `model(src, tgt)`.

    Weights and options are those of `torch.nn.Transformer`.

    >>> from tessera.ops.api.creation import zeros
    >>> Transformer(8, 2, 1, 1, 16)(zeros((5, 1, 8)), zeros((3, 1, 8))).shape
    (3, 1, 8)
    """

    def __init__(
        self, d_model: int = 512, nhead: int = 8, num_encoder_layers: int = 6, num_decoder_layers: int = 6,
        dim_feedforward: int = 2048, dropout: float = 0.1, activation: Any = "relu", custom_encoder: Any = None,
        custom_decoder: Any = None, layer_norm_eps: float = 1e-5, batch_first: bool = False, norm_first: bool = False,
        bias: bool = True, dtype: Any = f32,
    ) -> None:  # fmt: skip
        options = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first)
        self.encoder = custom_encoder or TransformerEncoder(
            [TransformerEncoderLayer(*options, bias, dtype) for _ in range(num_encoder_layers)],
            norm=LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype),
        )  # fmt: skip
        self.decoder = custom_decoder or TransformerDecoder(
            [TransformerDecoderLayer(*options, bias, dtype) for _ in range(num_decoder_layers)],
            norm=LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype),
        )  # fmt: skip

    @staticmethod
    def generate_square_subsequent_mask(sz: int, dtype: Any = f32) -> Tensor:
        """The causal mask [sz, sz], which is added to scores: -inf above the diagonal, 0 elsewhere.

        >>> Transformer.generate_square_subsequent_mask(2)
        Tensor([[  0., -inf],
                [  0.,   0.]], f32)
        """
        return triu(full((check_count("sz", sz), sz), float("-inf"), dtype=dtype), 1)

    def forward(
        self, src: Any, tgt: Any, src_mask: Any = None, tgt_mask: Any = None, memory_mask: Any = None,
        src_key_padding_mask: Any = None, tgt_key_padding_mask: Any = None, memory_key_padding_mask: Any = None,
        src_is_causal: bool = False, tgt_is_causal: bool = False, memory_is_causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """The decoded sequence."""
        memory = self.encoder(
            src, src_mask=src_mask, src_key_padding_mask=src_key_padding_mask, is_causal=src_is_causal
        )
        return self.decoder(  # type: ignore[no-any-return]
            tgt, memory, tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask, tgt_is_causal=tgt_is_causal,
            memory_is_causal=memory_is_causal,
        )  # fmt: skip


def stack_modules(modules: Any) -> Any:
    """Modules of one kind as one whose tensors have a leading axis: what `ts.scan` and `ts.vmap` iterate over.

    >>> stack_modules([Linear(2, 3), Linear(2, 3)]).weight.shape
    (2, 3, 2)

    Raises:
        ArgumentError: there is none, or they differ in more than the elements of their tensors.
    """
    listed = [check_module(m, "stack_modules") for m in modules]
    if not listed:
        raise ArgumentError("stack_modules of no modules", location=user_location(), expected="one or more")
    parts = [flatten(m, empty=True) for m in listed]
    trees = [tree for _, tree in parts]
    kinds = [[t.type for _, t in leaves] for leaves, _ in parts]
    if any(t != trees[0] for t in trees) or any(k != kinds[0] for k in kinds):
        raise ArgumentError(
            "the modules differ in kind, configuration or shapes", location=user_location(),
            expected="modules that differ only in the elements of their tensors",
        )  # fmt: skip
    columns = zip(*([t for _, t in leaves] for leaves, _ in parts), strict=True)
    return trees[0].build(iter([shapes.stack(list(column), axis=0) for column in columns]))


class Stack(Module):
    """Layers of one kind as one loop (`ts.scan`): compiled once, whatever their number.

    `rematerialise=True` recomputes each layer in the backward pass instead of storing its values (`ts.checkpoint`).
    New statistics of its layers (batch norm in training mode) are lost, of which a `LostUpdateWarning` tells.

    >>> from tessera.ops.api.creation import zeros
    >>> Stack([Linear(4, 4) for _ in range(3)])(zeros((2, 4))).shape
    (2, 4)
    """

    def __init__(self, layers: Any, rematerialise: bool = False) -> None:
        self.layers = stack_modules(layers)
        self.rematerialise = rematerialise

    def forward(self, x: Any) -> Tensor:
        """The result of the last layer."""

        def step(x: Tensor, layer: Module) -> tuple[Tensor, None]:
            return layer(x), None

        return scan(checkpoint(step) if self.rematerialise else step, as_tensor(x), self.layers)[0]  # type: ignore[no-any-return]
