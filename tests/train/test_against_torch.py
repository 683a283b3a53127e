"""Whole training runs against PyTorch: the same weights and data give the same curve."""

import numpy as np
import pytest

import tessera as ts
from examples import train_digits, train_gpt
from tessera import nn, optim

torch = pytest.importorskip("torch")


def test_a_hundred_steps_of_a_convolutional_network():
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(36, 10),
    )  # fmt: skip
    ours = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    )
    ours.load_state_dict(theirs.state_dict())
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((64, 1, 8, 8)).astype(np.float32), rng.integers(0, 10, 64)
    data = ts.train.Batches(x, y, size=16)
    theirs_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-3)
    loop = ts.train.Loop(
        ours, optim.SGD(lr=0.02, momentum=0.9, weight_decay=1e-3), train_digits.loss, target="cpu", progress=False
    )
    history = loop.run(data, epochs=25)
    expected = []
    for epoch in range(25):
        data.set_epoch(epoch)
        for a, b in data:
            theirs_optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(theirs(torch.tensor(a)), torch.tensor(b))
            loss.backward()
            theirs_optimizer.step()
            expected.append(loss.item())
    assert len(history) == 100 and expected[-1] < 0.5 * expected[0]
    np.testing.assert_allclose([r["loss"] for r in history], expected, rtol=2e-3, atol=2e-4)
    for name, t in theirs.state_dict().items():
        np.testing.assert_allclose(loop.model.state_dict()[name].numpy(), t.numpy(), rtol=5e-2, atol=5e-3, err_msg=name)


class TorchGPT(torch.nn.Module):
    """examples/train_gpt.py in PyTorch, written with its own layers."""

    def __init__(self, alphabet, length, width, heads, layers):
        super().__init__()
        self.embedding, self.positions = torch.nn.Embedding(alphabet, width), torch.nn.Module()
        self.positions.weight = torch.nn.Parameter(torch.zeros(length, width))
        self.blocks = torch.nn.ModuleList()
        for _ in range(layers):
            block = torch.nn.Module()
            block.norm1, block.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            block.attention = torch.nn.MultiheadAttention(width, heads, batch_first=True)
            block.up, block.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
            self.blocks.append(block)
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, alphabet, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, codes):
        x = self.embedding(codes) + self.positions.weight[: codes.shape[1]]
        mask = torch.triu(torch.ones(codes.shape[1], codes.shape[1], dtype=torch.bool), 1)
        for b in self.blocks:
            h = b.norm1(x)
            x = x + b.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
            x = x + b.down(torch.nn.functional.gelu(b.up(b.norm2(x))))
        return self.head(self.norm(x))


def test_the_gpt_example_has_the_curve_of_torch():
    steps, sizes = 12, {"width": 32, "heads": 2, "layers": 2}
    text = train_gpt.Text(train_gpt.read_text()[:20_000], length=16, size=8, batches=steps)
    loop = train_gpt.make_loop(text, steps, **sizes, target="cpu", progress=False)
    theirs = TorchGPT(len(text.alphabet), 16, *sizes.values())
    theirs.load_state_dict({n: torch.tensor(t.numpy().copy()) for n, t in loop.model.state_dict().items()})
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    expected = []
    for step, (x, y) in enumerate(text):
        optimizer.param_groups[0]["lr"] = loop.optimizer.lr(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(theirs(torch.tensor(x)).flatten(0, 1), torch.tensor(y.ravel()).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    text.set_epoch(0)
    found = [r["loss"] for r in loop.run(text)]
    assert expected[-1] < expected[0] - 0.3
    np.testing.assert_allclose(found, expected, rtol=2e-4)


def test_digits_are_learned():
    pytest.importorskip("sklearn")
    _, accuracy = train_digits.train(epochs=4, progress=False)
    assert accuracy >= 0.97
