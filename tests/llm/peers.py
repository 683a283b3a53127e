"""Models of transformers with random weights, and the same weights for ours."""

import numpy as np
import torch
import transformers

SMALL = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
# Classes by name: their modules take seconds to import, also where no test here runs.
KINDS = {
    "llama": ("LlamaConfig", {**SMALL, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {**SMALL, "rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**SMALL, "head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**SMALL, "sliding_window": 5}),
    "gpt2": ("GPT2Config", {"vocab_size": 96, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4}),
}


def make_peer(kind):
    """A model of transformers with random weights, none of them at its initial constant."""
    torch.manual_seed(0)
    name, sizes = KINDS[kind]
    config = getattr(transformers, name)(**sizes, eos_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn_like(p)
    return model.eval()


def compute_logits(peer, tokens):
    """Its logits after each token."""
    with torch.no_grad():
        return peer(torch.tensor([tokens])).logits[0].numpy()


def generate(peer, tokens, count):
    """Its greedy continuation, without a stop."""
    tokens = [int(t) for t in tokens]
    for _ in range(count):
        tokens.append(int(np.argmax(compute_logits(peer, tokens)[-1])))
    return tokens[-count:]
