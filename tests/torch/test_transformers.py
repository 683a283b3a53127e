"""Small models of `transformers` with random weights: loss and gradients through the backend equal eager PyTorch's."""

import copy

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import tessera as ts  # noqa: E402

# One layer, except where the program is compiled: what a layer computes does not depend on how many there are.
T = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
ATTENTION = {"attn_implementation": "sdpa"}


def ids(*shape):
    return torch.randint(2, 60, shape)


def make_bert():
    config = transformers.BertConfig(**T, **ATTENTION)
    return transformers.BertForMaskedLM(config), {"input_ids": (x := ids(2, 7)), "labels": x}


def make_gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32, **ATTENTION)
    return transformers.GPT2LMHeadModel(config), {"input_ids": (x := ids(2, 7)), "labels": x}


def make_llama():
    config = transformers.LlamaConfig(**T, num_key_value_heads=2, **ATTENTION)
    return transformers.LlamaForCausalLM(config), {"input_ids": (x := ids(2, 7)), "labels": x}


def make_qwen2():
    config = transformers.Qwen2Config(**T, num_key_value_heads=2, **ATTENTION)
    return transformers.Qwen2ForCausalLM(config), {"input_ids": (x := ids(2, 7)), "labels": x}


def make_t5():
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=64, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": ids(2, 7), "labels": ids(2, 5)}


def make_vit():
    sizes = {**T, "num_hidden_layers": 2, "vocab_size": None}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8, **ATTENTION)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": torch.randn(2, 3, 16, 16),
        "labels": ids(2) % 2,
    }


def make_whisper():
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, num_mel_bins=8, max_source_positions=10,
        max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 8, 20), "labels": ids(2, 5)
    }  # fmt: skip


def make_clip():
    text, vision = {**T, "max_position_embeddings": 16, "eos_token_id": 1}, {**T, "image_size": 16, "patch_size": 8}
    del vision["vocab_size"]
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    return model, {"input_ids": ids(2, 7), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


MAKERS = (make_bert, make_gpt2, make_llama, make_qwen2, make_t5, make_vit, make_whisper, make_clip)
MODELS = {make.__name__[5:]: make for make in MAKERS}
COMPILED = ("gpt2", "vit")  # the others run in the Graph interpreter, which compiles nothing


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step(name):
    torch._dynamo.reset()
    ts.torch.reset_report()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()  # without dropout, whose numbers are the backend's own; gradients all the same
    other = copy.deepcopy(model)
    options = {} if name in COMPILED else {"level": "graph"}
    run = torch.compile(other, backend=ts.torch.backend, options=options)
    wanted, found = model(**inputs), run(**inputs)
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-5, atol=1e-5)
    wanted.loss.backward()
    found.loss.backward()
    for (label, a), b in zip(other.named_parameters(), model.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), label
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=2e-5, msg=lambda m, label=label: f"{label}: {m}")
    assert not ts.torch.report().fallbacks, str(ts.torch.report())
