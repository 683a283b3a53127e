"""Federated averaging: the mean is exact, and one masked update says nothing."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import tessera as ts
from tessera.errors import ArgumentError, ShapeError
from tessera.research.federated import make_clients, unmask_sum

R = np.random.default_rng(0)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_the_sum_of_masked_updates_is_that_of_the_updates(count):
    updates = [
        {"w": R.standard_normal((4, 3)).astype("f4"), "b": R.standard_normal(3).astype("f4")} for _ in range(count)
    ]
    found = ts.federated.secure_aggregate(updates)
    for key in ("w", "b"):
        np.testing.assert_allclose(found[key].numpy(), np.mean([u[key] for u in updates], axis=0), atol=1e-7)
    weights = list(range(1, count + 1))
    found = ts.federated.secure_aggregate(updates, weights=weights)
    want = np.average([u["w"] for u in updates], axis=0, weights=weights)
    np.testing.assert_allclose(found["w"].numpy(), want, atol=1e-7)


def test_a_masked_update_is_uniform_whatever_it_hides():
    for update in (np.zeros(40_000), np.full(40_000, 123.0)):
        masked = make_clients(3)[1].mask(update)
        counts = np.bincount((masked >> np.uint64(56)).astype(int), minlength=256)
        assert stats.chisquare(counts).pvalue > 1e-4
        assert stats.kstest(masked / 2.0**64, "uniform").pvalue > 1e-4
        assert abs(np.corrcoef(masked[:-1] / 2.0**64, masked[1:] / 2.0**64)[0, 1]) < 0.03


def test_masks_are_fresh_each_time_and_differ_between_pairs():
    a, b = make_clients(3), make_clients(3)
    assert a[0].seeds[1] == a[1].seeds[0] != a[0].seeds[2] and a[0].seeds[1] != b[0].seeds[1]
    assert (a[0].mask(np.zeros(8)) != b[0].mask(np.zeros(8))).any()


def test_a_client_that_drops_out_needs_the_seeds_of_the_others():
    clients, updates = make_clients(4), R.standard_normal((4, 50))
    arrived = {c.number: c.mask(updates[c.number]) for c in clients if c.number != 2}
    assert np.abs(unmask_sum(arrived) - updates[[0, 1, 3]].sum(0)).max() > 1e3  # its masks do not cancel
    revealed = [(c.number, c.reveal([2])) for c in clients if c.number != 2]
    np.testing.assert_allclose(unmask_sum(arrived, revealed), updates[[0, 1, 3]].sum(0), atol=1e-8)


@pytest.mark.parametrize(
    ("updates", "named", "error"),
    [
        ([ts.ones(2)], {}, ArgumentError),
        ([], {}, ArgumentError),
        ([ts.ones(2), ts.ones(3)], {}, ShapeError),
        ([ts.ones(2), ts.full((2,), np.nan)], {}, ArgumentError),
        ([ts.ones(2), ts.full((2,), 1e12)], {}, ArgumentError),
        ([ts.ones(2), ts.ones(2)], {"method": "trust"}, ArgumentError),
        ([ts.ones(2), ts.ones(2)], {"weights": [1.0]}, ArgumentError),
        ([ts.ones(2), ts.ones(2)], {"weights": [-1.0, 2.0]}, ArgumentError),
    ],
)
def test_what_is_refused(updates, named, error):
    with pytest.raises(error):
        ts.federated.secure_aggregate(updates, **named)


def test_homomorphic_encryption():
    pytest.importorskip("phe")
    found = ts.federated.secure_aggregate([ts.Tensor([1.0, -2.0]), ts.Tensor([3.0, 6.0])], method="homomorphic")
    np.testing.assert_allclose(found.numpy(), [2.0, 2.0], rtol=1e-6)


@pytest.mark.parametrize("method", ["masks", "homomorphic"])
def test_15_3_federated_learning(method):
    if method == "homomorphic":
        pytest.importorskip("phe")
    want = np.float32([1.0, -2.0])

    @ts.federated
    class FederatedLearning:
        """Distributed learning with privacy"""

        def train_round(self, clients, global_model):
            client_updates = []
            for client in clients:
                local_model = copy.copy(global_model)
                for x, y in client.local_data:
                    gradient = ts.grad(lambda w, x=x, y=y: ((x @ w - y) ** 2).mean())(local_model.weights)
                    local_model.weights = local_model.weights - 0.1 * gradient
                client_updates.append(local_model.weights - global_model.weights)
            aggregated = ts.federated.secure_aggregate(client_updates, method=method)
            global_model.weights += aggregated
            return global_model

    clients = []
    for _ in range(3):
        x = R.standard_normal((4, 8, 2)).astype("f4")
        clients.append(SimpleNamespace(local_data=[(b, b @ want) for b in x]))
    model = SimpleNamespace(weights=ts.zeros((2,)))
    model = FederatedLearning().run(6 if method == "masks" else 1, clients, model)
    assert np.abs(model.weights.numpy() - want).max() < (0.1 if method == "masks" else 2.0)
    with pytest.raises(ArgumentError, match="train_round"):
        ts.federated(object)
