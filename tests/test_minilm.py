"""The real sentence encoder against an independent implementation's embeddings (see fixtures/minilm)."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
import tessera as ts  # noqa: E402
from examples.minilm import model, text, weights  # noqa: E402
from tessera.core.errors import DeviceUnavailable, FileError  # noqa: E402

FIXTURE = np.load(Path(__file__).parent / "fixtures" / "minilm" / "embeddings.npz")
try:
    weights.model_folder()
except DeviceUnavailable as missing:
    pytest.skip(str(missing), allow_module_level=True)


@pytest.fixture(scope="module")
def params():
    return model.parameters()


def cosines(found, rows):
    want = np.concatenate([FIXTURE["sentences"], FIXTURE["queries"]])[rows]
    return np.sum(found * want, axis=1)


@pytest.mark.parametrize("target", ["interp", "llvm"])
def test_embeddings_match(params, target):
    rows = np.r_[0:3, 64:67]
    encode = ts.jit(model.encode.function, target=target)
    found = encode(params, FIXTURE["ids"][rows], FIXTURE["mask"][rows]).numpy()
    assert cosines(found, rows).min() >= 0.9999
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)


def test_the_tokenizer_gives_the_fixture_ids():
    ids, mask = text.encode(text.lines("sentences.txt")[:64], 128)
    assert np.array_equal(ids, FIXTURE["ids"][:64]) and np.array_equal(mask, FIXTURE["mask"][:64])


def test_damaged_weights_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"short")
    with pytest.raises(FileError, match="model.safetensors"):
        weights.check_weights(file)


def test_the_artifact_carries_the_weights(params, tmp_path):
    ids, mask = FIXTURE["ids"][:2, :32], FIXTURE["mask"][:2, :32]
    ts.build(model.encode, params=params, ids=ids, mask=mask, out=tmp_path / "minilm", weights=("params",))
    loaded = ts.load(tmp_path / "minilm")
    assert [p["name"] for p in loaded.parameters] == ["ids", "mask"]
    assert np.allclose(loaded(ids, mask).numpy(), model.encode(params, ids, mask).numpy(), atol=1e-5)
