"""A two-layer perceptron: `tessera inspect examples/mlp.py` shows it at every level."""

import numpy as np

import tessera as ts


def inputs(rng: np.random.Generator) -> dict:
    """A batch of 64 and the weights of 128 -> 256 -> 32."""
    shapes = {"x": (64, 128), "w1": (128, 256), "b1": (256,), "w2": (256, 32), "b2": (32,)}
    return {
        name: rng.standard_normal(s, dtype=np.float32) / np.sqrt(s[0], dtype=np.float32) for name, s in shapes.items()
    }


def reference(x, w1, b1, w2, b2):
    """The same in NumPy, in double precision."""
    hidden = np.maximum(x.astype(np.float64) @ w1 + b1, 0)
    return hidden @ w2 + b2


@ts.example(inputs, reference)
@ts.jit
def mlp(
    x: ts.Tensor["B", "D"], w1: ts.Tensor["D", "H"], b1: ts.Tensor["H"], w2: ts.Tensor["H", "N"], b2: ts.Tensor["N"]
):
    """relu(x w1 + b1) w2 + b2."""
    hidden = ts.relu(x @ w1 + b1)
    return hidden @ w2 + b2
