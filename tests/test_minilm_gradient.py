"""The gradients of the real sentence encoder against PyTorch's in f64 (see fixtures/minilm/make_gradients.py)."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
import tessera as ts  # noqa: E402
from examples.minilm import model, weights  # noqa: E402
from tessera.core.errors import DeviceUnavailable  # noqa: E402

FOLDER = Path(__file__).parent / "fixtures" / "minilm"
GIVEN, WANT = np.load(FOLDER / "embeddings.npz"), np.load(FOLDER / "gradients.npz")
NAMES = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm1": "attention.output.LayerNorm",
    "norm2": "output.LayerNorm",
}
try:
    weights.model_folder()
except DeviceUnavailable as missing:
    pytest.skip(str(missing), allow_module_level=True)


def by_name(grads):
    """The gradients under the checkpoint's names, linear weights as [out, in]."""
    found = {}
    for number, layer in enumerate(grads["layers"]):
        for short, long in NAMES.items():
            for part in ("weight", "bias"):
                g = np.asarray(layer[short][part])
                found[f"encoder.layer.{number}.{long}.{part}"] = g.T
    tables = grads["embeddings"]
    for short, long in {"word": "word", "position": "position", "type": "token_type"}.items():
        found[f"embeddings.{long}_embeddings.weight"] = np.asarray(tables[short])
    found |= {f"embeddings.LayerNorm.{part}": np.asarray(tables["norm"][part]) for part in ("weight", "bias")}
    return found


def test_every_gradient():
    rows, length = int(WANT["rows"]), int(WANT["length"])
    ids, mask = GIVEN["ids"][:rows, :length], GIVEN["mask"][:rows, :length]
    cotangent = WANT["cotangent"].astype(np.float32)

    def loss(params, ids, mask):
        return (model.encode.function(params, ids, mask) * ts.Tensor(cotangent)).sum()

    found = by_name(ts.jit(ts.grad(loss), target="llvm")(model.parameters(), ids, mask))
    largest = WANT["norms"].max()
    for name, norm in zip(WANT["names"], WANT["norms"], strict=True):
        got = found[str(name)].astype(np.float64)
        assert np.linalg.norm(got) == pytest.approx(norm, rel=2e-4, abs=1e-6 * largest), name
        corner = WANT[f"corner/{name}"] if f"corner/{name}" in WANT.files else None
        if corner is not None:
            part = got[tuple(slice(n) for n in corner.shape)]
            np.testing.assert_allclose(
                part, corner, rtol=2e-3, atol=1e-4 * np.abs(corner).max() + 1e-7 * largest, err_msg=name
            )
