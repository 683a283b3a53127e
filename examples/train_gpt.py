"""A GPT of characters: learns to write like Python's own documentation, with a picture of its loss.

`python examples/train_gpt.py`; the text is `pydoc_data.topics`, some 700,000 characters of the standard library.
"""

import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

import tessera as ts
from tessera import nn, optim


class Text:
    """Random windows of a text as batches of `size` pairs: characters, and those that follow them."""

    def __init__(self, text: str, length: int, size: int, batches: int, seed: int = 0) -> None:
        self.alphabet = sorted(set(text))
        self.codes = np.array([self.alphabet.index(c) for c in text], np.int32)
        self.length, self.size, self.batches, self.seed, self.epoch = length, size, batches, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Other windows in each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self):
        rng = np.random.default_rng((self.seed, self.epoch))
        for _ in range(self.batches):
            starts = rng.integers(0, len(self.codes) - self.length - 1, self.size)
            windows = self.codes[starts[:, None] + np.arange(self.length + 1)]
            yield windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    """A pre-norm transformer block: attention to earlier characters, and a network of two layers."""

    def __init__(self, width: int, heads: int) -> None:
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x), is_causal=True)
        return x + self.down(ts.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer whose output layer is its table of embeddings (Radford et al. 2019)."""

    def __init__(self, alphabet: int, length: int, width: int, heads: int, layers: int) -> None:
        self.embedding = nn.Embedding(alphabet, width)
        self.embedding.weight = self.embedding.weight * 0.02
        self.positions = nn.LearnedPositions(length, width)
        self.blocks = [Block(width, heads) for _ in range(layers)]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def forward(self, codes):
        x = self.positions(self.embedding(codes))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model, codes, following):
    """Cross entropy of the next character, in nats."""
    logits = model(codes)
    return ts.cross_entropy(logits.reshape(-1, logits.shape[-1]), following.reshape(-1))


def make_loop(text: Text, steps: int, width: int = 128, heads: int = 4, layers: int = 3, **options) -> ts.train.Loop:
    """A loop over a new model."""
    ts.manual_seed(0)
    model = GPT(len(text.alphabet), text.length, width, heads, layers)
    schedule = optim.WarmupCosine(2e-3, warmup_steps=min(50, steps // 4), total_steps=steps, min_lr=2e-4)
    optimizer = optim.AdamW(lr=schedule, betas=(0.9, 0.95), weight_decay=0.1)
    return ts.train.Loop(model, optimizer, loss, clip_norm=1.0, **options)


def write(model: GPT, alphabet: list[str], start: str, count: int, seed: int = 0) -> str:
    """A continuation of a text, drawn character by character."""
    rng, length = np.random.default_rng(seed), model.positions.length
    model.eval()
    predict = ts.jit(model, target="cpu")
    codes = [alphabet.index(c) for c in start]
    for _ in range(count):
        given = codes[-length:]
        padded = np.array([given + [0] * (length - len(given))], np.int32)  # one size: compiled once
        logits = predict(padded).numpy()[0, len(given) - 1]
        shares = np.exp((logits - logits.max()) / 0.8)
        codes.append(int(rng.choice(len(alphabet), p=shares / shares.sum())))
    return "".join(alphabet[c] for c in codes)


def draw_curve(history: list[dict], path: Path) -> None:
    """The loss of each step as a picture (extra `pictures`)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    axes.plot([r["step"] for r in history], [r["loss"] for r in history])
    axes.set(xlabel="step", ylabel="loss (nats per character)", title="examples/train_gpt.py")
    figure.savefig(path, dpi=120)


def read_text() -> str:
    """Python's documentation of its language, by topic."""
    return "\n\n".join(topics[name] for name in sorted(topics))


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    text = Text(read_text(), length=64, size=32, batches=steps)
    loop = make_loop(text, steps, target="cpu", csv="gpt.csv")
    print(loop.model)
    history = loop.run(text)
    draw_curve(history, Path("gpt.png"))
    print(f"loss {history[0]['loss']:.3f} -> {np.mean([r['loss'] for r in history[-20:]]):.3f}; gpt.csv, gpt.png")
    print(write(loop.model, text.alphabet, "The ", 300))
