"""Handwritten digits: a small convolutional network learns to read 98% of images that it has not seen.

`python examples/train_digits.py`; the data are the 1,797 images of 8 × 8 pixels that scikit-learn ships with.
"""

import numpy as np

import tessera as ts
from tessera import nn, optim


def load_digits(seed: int = 0) -> tuple[np.ndarray, ...]:
    """Images [N, 1, 8, 8] from 0 to 1 and their digits: for training, and a quarter for the test."""
    from sklearn.datasets import load_digits as load

    held = load()
    order = np.random.default_rng(seed).permutation(len(held.target))
    images = (held.images[order, None] / 16.0).astype(np.float32)
    digits = held.target[order].astype(np.int64)
    test = len(order) // 4
    return images[test:], digits[test:], images[:test], digits[:test]


def make_model() -> nn.Module:
    """Two convolutions with batch norm, a pool, and two linear layers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(512, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def loss(model, images, digits):
    """Cross entropy of the logits."""
    return ts.cross_entropy(model(images), digits)


def accuracy(model, images, digits):
    """The share of images whose largest logit is that of their digit."""
    return ts.mean((ts.argmax(model(images), axis=-1) == digits).to(ts.f32))


def train(epochs: int = 6, target: str = "cpu", progress: bool | None = None) -> tuple[ts.train.Loop, float]:
    """The loop after training, and the accuracy on the test images."""
    ts.manual_seed(0)
    images, digits, test_images, test_digits = load_digits()
    data = ts.train.Batches(images, digits, size=64)
    schedule = optim.WarmupCosine(3e-3, warmup_steps=20, total_steps=epochs * len(data))
    loop = ts.train.Loop(make_model(), optim.AdamW(lr=schedule), loss, target=target, progress=progress)
    loop.run(data, epochs=epochs)
    test = ts.train.Batches(test_images, test_digits, size=64, shuffle=False)
    return loop, ts.train.evaluate(accuracy, loop.model, test, target=target)


if __name__ == "__main__":
    loop, found = train()
    loop.model.summary(ts.zeros((1, 1, 8, 8)))
    print(f"loss {loop.history[0]['loss']:.3f} -> {loop.history[-1]['loss']:.3f}, test accuracy {found:.1%}")
