"""Transforms of functions refuse what cannot be called, where it is given, and say which of them does."""

import pytest

import tessera as ts
from tessera.core.errors import ArgumentError

XS = ts.ones((3,))
# The transforms that take a function first; those that need more are called with the rest.
ALONE = (
    "autodiff", "checkpoint", "custom_jvp", "custom_vjp", "grad", "hessian", "jacfwd", "jacrev", "jit", "kernel",
    "memoize", "per_example_grad", "straight_through", "value_and_grad", "vmap",
)  # fmt: skip
CALLS = {name: (lambda f, name=name: getattr(ts, name)(f)) for name in ALONE} | {
    "accumulate_grad": lambda f: ts.accumulate_grad(f, 2),
    "associative_scan": lambda f: ts.associative_scan(f, XS),
    "cond then": lambda f: ts.cond(ts.Tensor(True), f, ts.exp, 1.0),
    "cond other": lambda f: ts.cond(ts.Tensor(True), ts.exp, f, 1.0),
    "fori_loop": lambda f: ts.fori_loop(0, 3, f, 1.0),
    "jvp": lambda f: ts.jvp(f, (1.0,), (1.0,)),
    "map": lambda f: ts.map(f, XS),
    "scan": lambda f: ts.scan(f, 0.0, XS),
    "spmd": lambda f: ts.spmd(f, mesh=ts.Mesh(2)),
    "vjp": lambda f: ts.vjp(f, 1.0),
    "while_loop cond": lambda f: ts.while_loop(f, lambda x: x, 1.0),
    "while_loop body": lambda f: ts.while_loop(lambda x: x < 2, f, 1.0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong", [3, "f", XS], ids=lambda w: type(w).__name__)
def test_what_is_no_function(name, wrong):
    with pytest.raises(ArgumentError) as caught:
        CALLS[name](wrong)
    said, named = caught.value, {"value_and_grad": "grad"}.get(name, name.partition(" ")[0])
    assert said.message == f"{named} takes a function"
    assert "test_functions_are_checked.py" in str(said.location) and said.received
    assert (said.suggestion is not None) == (wrong is XS)


READ = ("autodiff", "fori_loop", "jit", "kernel", "spmd")  # these read the source, the parameters or the index


class Same:
    """What can be called, and is no function."""

    __name__ = __qualname__ = "Same"

    def __call__(self, x, *rest):
        return x


@pytest.mark.parametrize("name", [n for n in CALLS if " " not in n and n not in (*READ, "scan")])
def test_what_can_be_called_is_taken(name):
    CALLS[name](Same())
