"""Differential privacy: the figures of other people's accountants, and attacks that noise must defeat."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

import tessera as ts
from tessera.errors import ArgumentError, ResourceError, ShapeError
from tessera.research.privacy import Accountant, find_delta, find_rdp, find_sigma

R = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "delta", "epsilon"),
    [  # Google's dp_accounting 0.6.0: RdpAccountant of the orders 2 to 511
        (1.0, 0.01, 1000, 1e-5, 2.1077530754515745),
        (1.1, 0.004, 10000, 1e-5, 2.0136063122258636),
        (2.0, 1.0, 10, 1e-6, 8.855389993163014),
        (4.0, 0.1, 100, 1e-5, 1.0817024008570084),
        (0.8, 0.02, 500, 1e-5, 5.397018914477776),
    ],
)
def test_the_accountant_agrees_with_another(sigma, rate, steps, delta, epsilon):
    found = Accountant(delta).step(sigma, rate, steps).epsilon
    assert found == pytest.approx(epsilon, rel=2e-3)
    parts = Accountant(delta).step(sigma, rate, steps // 2).step(sigma, rate, steps - steps // 2)
    assert parts.epsilon == pytest.approx(found) and parts.steps == steps


@pytest.mark.parametrize(("sigma", "rate", "order"), [(1.0, 0.1, 2), (2.0, 0.01, 8), (0.7, 0.3, 3), (1.5, 1.0, 5)])
def test_the_divergence_is_the_integral_of_its_definition(sigma, rate, order):
    """Rényi's divergence of the mixture (1-q) N(0, s²) + q N(1, s²) from N(0, s²)."""
    plain, moved = stats.norm(0, sigma), stats.norm(1, sigma)

    def density(x):
        ratio = (1 - rate) + rate * math.exp(moved.logpdf(x) - plain.logpdf(x))
        return plain.pdf(x) * ratio**order

    value, _ = integrate.quad(density, -30 * sigma, 30 * sigma, limit=500)
    assert find_rdp(sigma, rate, order) == pytest.approx(math.log(value) / (order - 1), rel=1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (0.1, 1e-3), (5.0, 1e-6), (20.0, 0.1)])
def test_one_release_has_exactly_its_delta(epsilon, delta):
    sigma = find_sigma(epsilon, delta)
    loss = stats.norm.cdf(0.5 / sigma - epsilon * sigma) - math.exp(epsilon) * stats.norm.cdf(
        -0.5 / sigma - epsilon * sigma
    )
    assert loss == pytest.approx(delta, rel=1e-6) and find_delta(sigma * 0.9, epsilon) > delta


@pytest.mark.parametrize(("steps", "rate"), [(1, 1.0), (10, 1.0), (100, 0.1)])
def test_the_noise_of_a_budget_spends_it(steps, rate):
    sigma = find_sigma(1.0, 1e-5, steps, rate)
    spent = Accountant(1e-5).step(sigma, rate, steps).epsilon
    assert spent <= 1.0 + 1e-9 if steps > 1 else spent < 1.1
    assert steps == 1 or spent > 0.999


def find_advantage(noise_of, epsilon, count=200_000):
    """The largest TPR - e^ε FPR of a threshold attack that tells a sum with an example from one without it."""
    without, with_one = noise_of(0.0, count), noise_of(1.0, count)
    cuts = np.quantile(np.concatenate([without, with_one]), np.linspace(0.001, 0.9999, 200))
    return max((with_one > c).mean() - math.exp(epsilon) * (without > c).mean() for c in cuts)


def test_an_attacker_gains_no_more_than_the_budget_allows():
    epsilon, delta = 1.0, 0.01
    made = ts.Generator(7)

    def release(value, count):
        return ts.privacy.add_gaussian_noise(
            ts.full((count,), value), sensitivity=1.0, epsilon=epsilon, delta=delta, generator=made
        ).numpy()

    slack = 3 / math.sqrt(200_000) * math.exp(epsilon)
    assert find_advantage(release, epsilon) <= delta + slack
    assert find_advantage(lambda v, n: v + R.normal(0, 0.8, n), epsilon) > delta + slack  # too little noise is caught


def test_the_noise_is_normal():
    made = ts.privacy.add_gaussian_noise(ts.zeros((50_000,)), 2.0, 1.0, 1e-5, ts.Generator(3)).numpy()
    assert stats.kstest(made / (2.0 * find_sigma(1.0, 1e-5)), "norm").pvalue > 0.01


@pytest.mark.parametrize("count", [1, 5])
def test_clipping_agrees_with_numpy_and_bounds_one_example(count):
    grads = {"w": R.standard_normal((count, 3, 2)).astype("f4") * 3, "b": R.standard_normal((count, 2)).astype("f4")}
    found = ts.clip_grad_norm(grads, 1.0)
    flat = np.concatenate([grads["w"].reshape(count, -1), grads["b"]], axis=1)
    scale = np.minimum(1.0, 1.0 / np.linalg.norm(flat, axis=1))
    np.testing.assert_allclose(found["w"].numpy(), (grads["w"] * scale[:, None, None]).sum(0), rtol=1e-5, atol=1e-6)
    other = {k: np.concatenate([v, 1e6 * np.ones_like(v[:1])]) for k, v in grads.items()}
    moved = [ts.clip_grad_norm(other, 1.0)[k].numpy() - found[k].numpy() for k in grads]
    assert math.sqrt(sum((m**2).sum() for m in moved)) <= 1 + 1e-5


def test_examples_without_a_finite_gradient_count_nothing():
    found = ts.clip_grad_norm(ts.Tensor([[np.nan, 1.0], [np.inf, 0.0], [0.0, 0.5], [0.0, 0.0]]), 1.0)
    assert found.tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ts.clip_grad_norm(ts.ones((2, 2)), 0.0), ArgumentError),
        (lambda: ts.clip_grad_norm(ts.ones(()), 1.0), ShapeError),
        (lambda: ts.clip_grad_norm([ts.ones((2, 2)), ts.ones((3, 2))], 1.0), ShapeError),
        (lambda: ts.privacy.add_gaussian_noise(ts.ones(2), -1.0, 1.0), ArgumentError),
        (lambda: ts.privacy.add_gaussian_noise(ts.ones(2), 1.0, 0.0), ArgumentError),
        (lambda: ts.privacy.add_gaussian_noise(ts.ones(2), 1.0, float("nan")), ArgumentError),
        (lambda: find_sigma(1.0, 1.0), ArgumentError),
        (lambda: find_sigma(1.0, 1e-5, steps=0), ArgumentError),
        (lambda: find_sigma(1.0, 1e-5, sample_rate=2.0), ArgumentError),
        (lambda: Accountant(1e-5).step(0.0), ArgumentError),
        (lambda: ts.privacy.compute_clip_norm(1.0, 1e-5, 0), ArgumentError),
    ],
)
def test_what_is_refused(call, error):
    with pytest.raises(error):
        call()


def test_15_3_differential_privacy():
    w = {"value": ts.zeros((3,))}
    data = [(R.standard_normal((8, 3)).astype("f4"), R.standard_normal((8,)).astype("f4")) for _ in range(4)]

    @ts.privacy.differential(epsilon=1.0, delta=1e-5, steps=4)
    def private_training(dataset):
        max_grad_norm = ts.privacy.compute_clip_norm(epsilon=1.0, delta=1e-5, dataset_size=len(dataset) * 8)
        for x, y in dataset:
            grads = ts.per_example_grad(lambda w, x, y: (x @ w - y) ** 2)(w["value"], x, y)
            clipped = ts.clip_grad_norm(grads, max_grad_norm)
            noisy_grads = ts.privacy.add_gaussian_noise(clipped, sensitivity=max_grad_norm, epsilon=1.0)
            w["value"] = w["value"] - 0.1 * noisy_grads

    private_training(data)
    assert private_training.session.released == 4 and private_training.session.spent <= 1.0 + 1e-9
    with pytest.raises(ResourceError, match="budget"):
        private_training([*data, data[0]])
    with pytest.raises(ArgumentError, match="more than the budget"):
        ts.privacy.differential(0.5)(lambda: ts.privacy.add_gaussian_noise(ts.ones(1), 1.0, epsilon=1.0))()
