"""Vision transformers (Dosovitskiy et al. 2021), with the names of torchvision's state dicts.

python examples/vision/classify.py vit_b_16 --weights vit_b_16.pth --image photo.npy
"""

from __future__ import annotations

import tessera as ts
from tessera import nn


class EncoderBlock(nn.Module):
    """Self-attention and a perceptron, each after a layer norm and beside a shortcut."""

    def __init__(self, features: int, heads: int, hidden: int) -> None:
        self.ln_1 = nn.LayerNorm(features, eps=1e-6)
        self.self_attention = nn.MultiheadAttention(features, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(features, eps=1e-6)
        # The names "0" and "3" are those of the linear layers among activation and dropout.
        self.mlp = nn.ModuleDict({"0": nn.Linear(features, hidden), "3": nn.Linear(hidden, features)})

    def forward(self, x):
        """Tokens [N, S, features] to the same shape."""
        x = x + self.self_attention(self.ln_1(x))
        return x + self.mlp["3"](ts.gelu(self.mlp["0"](self.ln_2(x))))


class Encoder(nn.Module):
    """Learned positions, blocks, and a last norm."""

    def __init__(self, tokens: int, depth: int, features: int, heads: int, hidden: int) -> None:
        self.pos_embedding = nn.Parameter(nn.init.normal((1, tokens, features), std=0.02))
        blocks = {f"encoder_layer_{i}": EncoderBlock(features, heads, hidden) for i in range(depth)}
        self.layers = nn.ModuleDict(blocks)
        self.ln = nn.LayerNorm(features, eps=1e-6)

    def forward(self, x):
        """Tokens [N, S, features] to the same shape."""
        x = x + self.pos_embedding
        for block in self.layers.values():
            x = block(x)
        return self.ln(x)


class VisionTransformer(nn.Module):
    """An image cut into patches, each a token; a class token is classified."""

    def __init__(
        self, image: int, patch: int, depth: int, heads: int, features: int, hidden: int, classes: int = 1000
    ) -> None:
        if image % patch:
            raise ts.errors.ArgumentError(f"images of {image} are not whole patches of {patch}")
        self.conv_proj = nn.Conv2d(3, features, patch, stride=patch)
        self.class_token = nn.Parameter(ts.zeros((1, 1, features)))
        self.encoder = Encoder((image // patch) ** 2 + 1, depth, features, heads, hidden)
        self.heads = nn.ModuleDict({"head": nn.Linear(features, classes)})

    def forward(self, images):
        """Images [N, 3, image, image] to logits [N, classes]."""
        patches = self.conv_proj(images)
        tokens = patches.reshape(patches.shape[0], patches.shape[1], -1).permute(0, 2, 1)
        first = ts.broadcast_to(self.class_token, (tokens.shape[0], 1, tokens.shape[2]))
        return self.heads["head"](self.encoder(ts.concatenate([first, tokens], axis=1))[:, 0])


# Patch, depth, heads, features, hidden features.
SIZES = {
    "vit_b_16": (16, 12, 12, 768, 3072),
    "vit_b_32": (32, 12, 12, 768, 3072),
    "vit_l_16": (16, 24, 16, 1024, 4096),
    "vit_l_32": (32, 24, 16, 1024, 4096),
}


def make_vit(name: str, classes: int = 1000, image: int = 224) -> VisionTransformer:
    """A vision transformer by its name."""
    if name not in SIZES:
        raise ts.errors.ArgumentError(f"there is no ViT {name!r}", expected=", ".join(SIZES))
    return VisionTransformer(image, *SIZES[name], classes)
