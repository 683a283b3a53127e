"""GGUF files that the gguf package writes: a Qwen2 model against transformers, and broken files."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
pytest.importorskip("torch")
pytest.importorskip("transformers")
from tessera.core.errors import ArgumentError, FileError, ShapeError  # noqa: E402
from tessera.llm import LanguageModel, open_gguf, read_gguf  # noqa: E402
from tessera.llm.gguf_reader import GGUFFile  # noqa: E402
from tests.llm.peers import SMALL, compute_logits, make_peer  # noqa: E402

LAYER = {"input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip


@pytest.fixture(scope="module")
def peer():
    return make_peer("qwen2")


def write(path, peer, change=None, family="qwen2"):
    """The weights of a model as a GGUF file of f32 with llama.cpp's names; `change(tensors)` may break them."""
    tensors = {"token_embd.weight": peer.model.embed_tokens.weight, "output_norm.weight": peer.model.norm.weight}
    for i, layer in enumerate(peer.model.layers):
        for name, p in layer.named_parameters():
            stem, _, kind = name.rpartition(".")
            tensors[f"blk.{i}.{LAYER[stem]}.{kind}"] = p
    tensors = {n: p.detach().numpy() for n, p in tensors.items()}
    if change:
        change(tensors)
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(SMALL["hidden_size"])
    writer.add_feed_forward_length(SMALL["intermediate_size"])
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return path


def test_a_model_of_halves_with_biases(peer, tmp_path):
    config, weights = read_gguf(open_gguf(write(tmp_path / "model.gguf", peer)))
    tokens = [5, 3, 90, 17, 4]
    got = LanguageModel(config, weights, target="llvm").logits(tokens).numpy()
    want = compute_logits(peer, tokens)
    assert np.abs(got - want).max() <= 2e-5 * np.abs(want).max()


BROKEN = (
    (lambda t: t.pop("token_embd.weight"), FileError, "no tensor token_embd.weight"),
    (lambda t: t.pop("blk.1.ffn_up.weight"), FileError, r"no parameter layers\.1\.up\.weight"),
    (lambda t: t.update({"blk.0.other.weight": np.ones(4, np.float32)}), FileError, r"does not use"),
    (lambda t: t.update({"blk.1.attn_q.bias": np.ones(4, np.float32)}), ShapeError, r"layers\.1\.q\.bias \(blk"),
)


@pytest.mark.parametrize(("change", "error", "text"), BROKEN)
def test_broken_tensors_are_named(peer, tmp_path, change, error, text):
    with pytest.raises(error, match=text):
        read_gguf(open_gguf(write(tmp_path / "model.gguf", peer, change)))


def test_a_format_that_is_not_read_is_named():
    tensor = SimpleNamespace(tensor_type=SimpleNamespace(name="IQ1_S"), data=np.zeros(4, np.uint8))
    with pytest.raises(FileError, match="tensor w of a.gguf has the format IQ1_S, which is not supported"):
        GGUFFile(Path("a.gguf"), {}, {"w": tensor}).read("w")


def test_broken_files(peer, tmp_path):
    with pytest.raises(ArgumentError, match="mamba"):
        read_gguf(open_gguf(write(tmp_path / "other.gguf", peer, family="mamba")))
    data = write(tmp_path / "model.gguf", peer).read_bytes()
    for size in (0, 4, 20, 300, len(data) - 200):
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(FileError, match="cut.gguf is no whole GGUF file"):
            open_gguf(tmp_path / "cut.gguf")
    with pytest.raises(FileError, match="no file"):
        open_gguf(tmp_path / "none.gguf")
