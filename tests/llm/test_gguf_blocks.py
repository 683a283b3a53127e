"""Block formats of GGUF against the dequantisation of the gguf package, bit for bit."""

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
from tessera.llm.gguf_blocks import READERS, read_blocks  # noqa: E402
from tessera.stdlib.quantised import QuantisedMatrix, dequantise, take_rows  # noqa: E402

SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where the f16 scales of blocks are


def make_bytes(kind, rows, columns, rng):
    type = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        return gguf.quants.quantize(rng.standard_normal((rows, columns)).astype(np.float32), type)
    size, count = gguf.GGML_QUANT_SIZES[type]
    data = rng.integers(0, 256, (rows, columns // size, count), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = rng.standard_normal((rows, columns // size, 1)).astype(np.float16)
        data[..., at : at + 2] = scale.view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("kind", READERS)
def test_elements_are_those_of_gguf(kind):
    data = make_bytes(kind, 6, 512, np.random.default_rng(0))
    want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    found = read_blocks(kind, data)
    if isinstance(found, QuantisedMatrix):
        assert found.shape == (6, 512)
        assert np.array_equal(take_rows(found, [[4, 1]]).numpy(), want[[[4, 1]]])
        found = dequantise(found).numpy()
    assert np.array_equal(np.asarray(found, np.float32), want)
