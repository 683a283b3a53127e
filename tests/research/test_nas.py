"""Architecture search: the controller finds what is good, and better than chance does."""

import numpy as np
import pytest
from scipy import stats

import tessera as ts
from tessera.errors import ArgumentError

SPACE = {"a": ["conv3x3", "conv5x5", "maxpool"], "b": [16, 32, 64], "c": ["relu", "gelu"]}
GOOD = {"a": "conv5x5", "b": 64, "c": "gelu"}


def reward(architecture, rng):
    return sum(architecture[k] == v for k, v in GOOD.items()) / 3 + rng.normal(0, 0.1)


def search(seed, steps=300, learn=True):
    controller, rng, rewards = ts.nas.Controller(SPACE, seed=seed), np.random.default_rng(seed), []
    for _ in range(steps):
        architecture = controller.sample()
        rewards.append(reward(architecture, rng))
        if learn:
            controller.update(architecture, rewards[-1])
    return controller, rewards


@pytest.mark.parametrize("seed", range(3))
def test_the_controller_finds_the_good_choices(seed):
    controller, _ = search(seed)
    assert all(controller.probabilities()[k][v] > 0.8 for k, v in GOOD.items())
    assert dict(controller.best_architecture().choices) == GOOD


def test_it_is_better_than_chance():
    learned = np.concatenate([search(s)[1][-100:] for s in range(3)])
    drawn = np.concatenate([search(s, learn=False)[1][-100:] for s in range(3)])
    assert stats.ttest_ind(learned, drawn, equal_var=False, alternative="greater").pvalue < 1e-6


def test_samples_have_the_probabilities_and_repeat_by_seed():
    controller = ts.nas.Controller(SPACE, seed=5)
    drawn = [controller.sample()["a"] for _ in range(3000)]
    assert stats.chisquare([drawn.count(c) for c in SPACE["a"]]).pvalue > 1e-3
    assert [ts.nas.Controller(SPACE, seed=5).sample() for _ in range(3)][0] == ts.nas.Controller(SPACE, seed=5).sample()


def test_one_step_is_the_gradient_of_the_log_probability():
    controller = ts.nas.Controller({"op": ["a", "b", "c"]}, learning_rate=0.5, entropy=0.0)
    architecture = next(a for a in iter(controller.sample, None) if a["op"] == "b")
    controller.update(architecture, 0.0)  # the baseline
    controller._logits["op"] = before = np.array([0.0, 1.0, -1.0])
    controller.update(architecture, 2.0)
    p = np.exp(before) / np.exp(before).sum()
    logits = before + 0.5 * 2.0 * (np.array([0, 1, 0]) - p)  # d log p(b) / d logits
    want = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(list(controller.probabilities()["op"].values()), want)


def test_without_signal_nothing_is_decided():
    controller, rng = ts.nas.Controller({"op": ["x", "y"]}, learning_rate=0.05), np.random.default_rng(0)
    for _ in range(300):
        controller.update(controller.sample(), rng.normal())
    assert 0.1 < controller.probabilities()["op"]["x"] < 0.9


def test_what_is_refused():
    with pytest.raises(ArgumentError, match="without choices"):
        ts.nas.Controller({"a": []})
    controller = ts.nas.Controller(SPACE)
    with pytest.raises(ArgumentError, match="no architecture"):
        controller.best_architecture()
    with pytest.raises(ArgumentError, match="nothing to learn"):
        controller.update(ts.nas.Controller().sample(), 1.0)
    with pytest.raises(ArgumentError, match="nothing to learn"):
        controller.update(controller.sample(), float("nan"))
    with pytest.raises(ArgumentError):
        ts.nas(object)


def test_15_3_neural_architecture_search():
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype("f4")

    @ts.nas
    class NeuralArchitectureSearch:
        """Automated architecture discovery"""

        def __init__(self, search_space):
            self.search_space = search_space
            self.controller = ts.nas.Controller()

        def search(self, dataset, epochs=100):
            for _ in range(epochs):
                arch = self.controller.sample()
                model = self.build_model(arch)
                accuracy = self.train_and_eval(model, dataset)
                self.controller.update(arch, accuracy)
            return self.controller.best_architecture()

        def build_model(self, arch):
            """Construct model from architecture"""
            layers = []
            for op in arch.operations:
                if op == "conv3x3":
                    layers.append(ts.nn.Conv2d(3, 3, 3, padding=1))
                elif op == "conv5x5":
                    layers.append(ts.nn.Conv2d(3, 3, 5, padding=2))
                elif op == "maxpool":
                    layers.append(ts.nn.MaxPool2d(1))
            return ts.Sequential(*layers)

        def train_and_eval(self, model, dataset):
            assert model(dataset).shape == dataset.shape
            return -float(sum(p.size for _, p in model.named_parameters()))

    found = NeuralArchitectureSearch(ts.nas.Controller().space).search(ts.Tensor(x), epochs=12)
    assert len(found.operations) == 4 and found.operations.count("conv5x5") <= 1
