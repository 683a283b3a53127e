"""A small GPT under each kind of parallelism has the loss curve of one device; over MPI too (test_mpi.py)."""

import functools

import numpy as np
import pytest

from examples.dist import gpt

STEPS = 2


@functools.cache
def losses_of_one(experts):
    config = gpt.Config(experts=experts)
    return gpt.one(config, STEPS)


@pytest.mark.parametrize("name", [n for n in gpt.STRATEGIES if n != "one"])
def test_loss_curve(name):
    config = gpt.make_config(name)
    wanted = losses_of_one(config.experts)
    assert wanted[1] != wanted[0]
    np.testing.assert_allclose(gpt.STRATEGIES[name](config, STEPS, "simulated"), wanted, rtol=2e-6)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("interleaved", 2)])
def test_schedules_of_a_pipeline(schedule, chunks):
    found = gpt.pp(gpt.Config(), 2, "simulated", schedule=schedule, chunks=chunks)
    np.testing.assert_allclose(found, losses_of_one(0)[:2], rtol=2e-6)


def test_the_loss_of_one_device_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    config = gpt.Config(blocks=1)
    params = gpt.init(config)
    tokens, targets = gpt.make_batch(config, 0)
    t = {k: torch.tensor(v.numpy()) for k, v in {**params, **params["blocks"][0]}.items() if k != "blocks"}
    x = t["tokens"][torch.tensor(tokens.numpy())] + t["places"]
    norm = torch.nn.functional.rms_norm
    h = norm(x, (16,), eps=1e-5)
    q, k, v = ((h @ t[n]).reshape(8, 8, 4, 4).transpose(1, 2) for n in ("wq", "wk", "wv"))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + y.transpose(1, 2).reshape(8, 8, 16) @ t["wo"]
    x = x + torch.nn.functional.gelu(norm(x, (16,), eps=1e-5) @ t["w1"]) @ t["w2"]
    wanted = torch.nn.functional.cross_entropy(
        (x @ t["head"]).reshape(-1, 32), torch.tensor(targets.numpy()).reshape(-1)
    )
    np.testing.assert_allclose(gpt.one(config, 1)[0], wanted.item(), rtol=1e-5)
