"""Models by one call: against `transformers` on the same weights, with every choice of options."""

import inspect

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, ShapeError

SIZES = {"vocabulary": 61, "context": 12, "width": 16, "layers": 2, "heads": 4}
TOKENS = np.random.default_rng(0).integers(0, 61, (2, 9))


def test_the_default_sizes_are_those_of_the_published_model():
    small = sum(np.prod(p.shape) for p in ts.models.GPT2(vocabulary=1, layers=1).parameters())
    layer, rows = 12 * 768 * 768 + 13 * 768, 50256
    assert small + 11 * layer + rows * 768 == 124_439_808  # as the published model counts
    defaults = inspect.signature(ts.models.GPT2.__init__).parameters
    assert (defaults["vocabulary"].default, defaults["layers"].default) == (rows + 1, 12)


def test_logits_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=61, n_positions=12, n_embd=16, n_layer=2, n_head=4)
    peer = transformers.GPT2LMHeadModel(config).eval()
    names = {
        "ln_1": "norm1", "ln_2": "norm2", "attn.c_attn.": "self_attn.in_proj_", "attn.c_proj": "self_attn.out_proj",
        "mlp.c_fc": "linear1", "mlp.c_proj": "linear2", "h.": "blocks.", "ln_f": "norm", "wte": "embedding",
        "wpe": "positions",
    }  # fmt: skip
    weights = {}
    for name, x in peer.transformer.state_dict().items():
        turned = any(part in name for part in ("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        for theirs, ours in names.items():
            name = name.replace(theirs, ours, 1)
        weights[name] = (x.T if turned else x).contiguous().numpy()
    model = ts.models.GPT2(**SIZES)
    model.load_state_dict(weights)
    with torch.no_grad():
        want = peer(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(model(TOKENS).numpy(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "limit"),
    [({"attention": "standard"}, 1e-6), ({"compile_mode": "optimize"}, 1e-6), ({"compile_mode": "tune"}, 1e-6),
     ({"precision": "mixed", "attention": "flash2", "compile_mode": "optimize"}, 2e-2)],
)  # fmt: skip
def test_options_change_how_a_model_is_computed(options, limit):
    plain, other = ts.models.GPT2(**SIZES), ts.models.GPT2(**SIZES, **options)
    other.load_state_dict(plain.state_dict())
    want, found = plain(TOKENS).numpy(), other(TOKENS).numpy()
    assert np.abs(want - found).max() <= limit * np.abs(want).max()


def test_a_model_is_trained():
    model = ts.models.GPT2(**SIZES)

    def loss(model):
        return ts.cross_entropy(model(TOKENS[:, :-1]).reshape(-1, 61), TOKENS[:, 1:].reshape(-1))

    step = ts.jit(ts.value_and_grad(loss))
    first, gradients = step(model)
    better = ts.tree.map(lambda p, g: p - 0.5 * g, model, gradients)
    assert loss(better).item() < first.item()


def test_refusals():
    with pytest.raises(ArgumentError, match="attention is 'flash9'"):
        ts.models.GPT2(**SIZES, attention="flash9")
    with pytest.raises(ArgumentError, match="compile_mode is 'fast'"):
        ts.models.GPT2(**SIZES, compile_mode="fast")
    model = ts.models.GPT2(**SIZES)
    with pytest.raises(ShapeError, match=r"tokens are \[batch, positions\]"):
        model(TOKENS[0])
    with pytest.raises(ShapeError, match="the sequence is too long"):
        model(np.zeros((1, 13), np.int64))
