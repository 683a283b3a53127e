"""Effects: declared, inferred with and without running, suspended, refused; and their order through the passes."""

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, EffectError
from tessera.ir.core import Module
from tessera.ir.rewrite import has_effect
from tessera.lower.lowering_plan import LoweringPlan
from tessera.lower.pipeline import PIPELINE
from tessera.transforms.functional import compose, curry


@ts.effects(["random", "io"])
def dropout(x, p=0.5):
    return x * (ts.rand(x.shape) > p).to(x.dtype)


@ts.pure
def add(x, y):
    return x + y


def composed_function(x):
    y = add(x, x)
    z = dropout(y)
    return z


def test_inference_without_running():
    assert ts.effects.of(composed_function) == {"random", "io"}
    assert ts.effects.of(add) == set() == ts.effects.of(lambda x: ts.exp(add(x, x)))
    assert ts.effects.of(compose(add, composed_function)) == {"random", "io"}
    assert ts.effects.of(curry(composed_function, x=1.0)) == {"random", "io"}
    assert ts.effects.of(ts.jit(composed_function)) == {"random", "io"}
    assert ts.effects.of(lambda: [print(i) for i in range(3)]) == {"io"}
    assert ts.effects.of(lambda: composed_function(np.ones(3))) == {"random", "io"}


class Layer:
    def __init__(self, body):
        self.body, self.other = body, dropout

    def __call__(self, x):
        return self.body(x)

    def forward(self, x):
        return self.body(x)


NOISY, QUIET, PARTS = Layer(dropout), Layer(add), [add, dropout]


def by_default(x, body=dropout):
    return body(x)


@pytest.mark.parametrize(
    "calls",
    [NOISY, NOISY.forward, by_default, lambda x: NOISY(x), lambda x: NOISY.forward(x), lambda x: PARTS[1](x)],
)
def test_inference_through_objects_methods_defaults_and_lists(calls):
    assert ts.effects.of(calls) == {"random", "io"}


def test_every_method_is_looked_into():
    """Bound methods are made anew at each access, in memory that the last one left."""
    assert ts.effects.of(lambda x: QUIET.forward(QUIET.forward(x)) + NOISY.forward(x)) == {"random", "io"}


def test_attributes_that_a_method_does_not_use():
    assert ts.effects.of(QUIET) == ts.effects.of(lambda x: QUIET.forward(x)) == set()


def test_inference_by_running_and_by_tracing():
    assert ts.effects.inferred(lambda x: x + ts.rand(3), ts.ones(3)) == {"random"}
    assert ts.effects.inferred(ts.jit(lambda x: ts.dropout(x)).trace, ts.ones(3)) == {"random"}
    assert ts.effects.inferred(lambda x: x * 2.0, ts.ones(3)) == set()
    assert ts.effects.inferred(lambda x: x + ts.rand(3, generator=ts.Generator(1)), ts.ones(3)) == set()


def test_a_pure_function_with_an_effect_is_an_error_where_it_is_defined():
    with pytest.raises(EffectError, match="has the effect 'io'"):

        @ts.pure
        def loud(x):
            print(x)
            return x

    with pytest.raises(EffectError, match="'io'"):

        @ts.effects(["random"])
        def undeclared(x):
            return composed_function(x)


def test_what_cannot_be_seen_in_the_code_is_an_error_when_traced():
    hidden = {"draw": lambda n: ts.rand(n)}

    @ts.jit
    @ts.pure
    def model(x):
        return x + hidden["draw"](3)

    with pytest.raises(EffectError, match="model has the effect 'random'") as caught:
        model.trace(ts.Tensor[3, ts.f32])  # nothing has run
    assert caught.value.location.file == __file__


def test_a_generator_of_its_own_is_no_effect():
    @ts.pure
    def noise(seed):
        return ts.rand(3, generator=ts.Generator(seed))

    np.testing.assert_array_equal(noise(1), noise(1))
    shared = ts.Generator(2)
    with pytest.raises(EffectError):
        ts.pure(lambda: ts.rand(3, generator=shared))()


def test_suspended_effects():
    logged = []

    @ts.effects(["io"])
    def log(x):
        logged.append(x)

    @ts.effects(["all"])
    def training_step(batch, inside):
        with ts.effects.suspend("io"):
            loss = ts.sum(batch * ts.rand(3))
            if inside:
                log(loss)
        log(loss)
        return loss

    training_step(ts.ones(3), False)
    assert len(logged) == 1
    with pytest.raises(EffectError, match="suspended"):
        training_step(ts.ones(3), True)


def test_effects_under_transforms():
    pure_loss = ts.pure(lambda x: (x * x).sum())
    assert ts.grad(pure_loss)(3.0).item() == 6.0
    assert ts.vmap(ts.jit(pure_loss))(ts.ones((2, 3))).tolist() == [3.0, 3.0]
    with pytest.raises(EffectError):
        ts.pure(ts.grad(lambda x: (x * ts.rand(())).sum()))(3.0)


def test_no_such_effect():
    with pytest.raises(ArgumentError, match="no effect 'magic'"):
        ts.effects(["magic"])


def test_passes_keep_effects_and_their_order():
    """Decompositions run on the host, which counts as an effect: none is lost, shared or moved past another."""

    def program(x):
        first = ts.cholesky(x)
        ts.eigh(x)  # its result is not used
        return ts.cholesky(x) + first, ts.qr(x)[0]

    function = ts.jit(program).trace(np.eye(3)).function
    names = [n.op.name for n in function.body.nodes if has_effect(n)]
    for pass_name in ("simplify", "common subexpressions", "dead code"):
        function = dict(PIPELINE)[pass_name](Module("graph", (function,)), LoweringPlan()).main
        assert [n.op.name for n in function.body.nodes if has_effect(n)] == names
    assert names == ["ts.cholesky", "ts.eigh", "ts.cholesky", "ts.qr"]
