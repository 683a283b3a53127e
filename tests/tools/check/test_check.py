"""`ts.check`: what is right passes, what cannot be known is not an error, and every form of annotation is read."""

import sys

import numpy as np
import pytest
from test_programs import load

import tessera as ts
from examples.attention import attention
from examples.minilm.model import encode
from examples.mlp import mlp
from tessera import tile
from tessera.core.errors import ArgumentError

T = ts.Tensor
B, D, H = ts.dims("B D H")


def part(*shape):
    return {"weight": T[shape], "bias": T[shape[-1:]]}


LAYER = {name: part(384, 384) for name in ("query", "key", "value", "output")}
LAYER |= {"up": part(384, 1536), "down": part(1536, 384), "norm1": part(384), "norm2": part(384)}
TABLES = {"word": T[30522, 384], "position": T[512, 384], "type": T[2, 384], "norm": part(384)}
IDS = T["B", 64, ts.int32]


@pytest.mark.parametrize(
    ("function", "types"),
    [
        (mlp, ()),
        (attention, (T["B", "S", 64], *[T[64, 64]] * 4)),
        (encode, ({"embeddings": TABLES, "layers": [LAYER] * 2}, IDS, IDS)),
    ],
)
def test_examples_are_right(function, types):
    report = ts.check(function, *types)
    assert report.ok and not report.notes, str(report)


def test_a_wrong_weight_is_found_deep_inside():
    layers = [LAYER, {**LAYER, "up": part(384, 1500)}]
    (finding,) = ts.check(encode, {"embeddings": TABLES, "layers": layers}, IDS, IDS).findings
    assert finding.function == "dense" and [name for _, name in finding.stack] == ["encode", "block", "dense"]
    assert "part['weight'] is Tensor[1536, 384], the parameter params.layers.1.down.weight, line 75" in finding.why


def total(tree):
    """A walk by recursion over a tree of dicts."""
    if isinstance(tree, dict):
        return sum(total(v) for v in tree.values())
    return ts.sum(tree * tree)


def loss(params, x: T["B", "D"], y: T["B", "K"]):
    return ts.mse(ts.relu(x @ params["w1"]) @ params["w2"], y)


def right_recursion(params, x: T["B", "D"]):
    return total(params) + total({"a": {"b": x}, "c": x})


def right_gradient(params, x: T["B", "D"], y: T["B", "K"]):
    value, grads = ts.value_and_grad(loss)(params, x, y)
    return value, {k: params[k] - 0.1 * grads[k] for k in params}, total(grads)


def right_gradient_of_a_closure(params, x: T["B", "D"], y: T["B", "K"]):
    return ts.grad(lambda x: loss(params, x, y))(x)


def right_batched_with_an_unknown(x: T["B", 8], w):
    return ts.vmap(lambda row: ts.sum(row * w))(x) + ts.jit(lambda x: x * w)(x)


def right_with_names(x: T[B, D], w: T[D, 2 * H]) -> T[B, "2*H"]:
    return x @ w


def right_with_any_dims(x: T["...", "D"], scale: T["D"]) -> T["...", "D"]:
    return ts.softmax(x * scale)


def right_with_expressions_first(x: T["2*B"], y: T["B"]) -> T["2*B"]:
    return ts.concatenate([y, y]) + x


def right_with_policy(x: T["B", ts.bf16 @ ts.accum(ts.f32)]) -> tuple[T["B", ts.bf16], T[ts.bf16]]:
    return x * 2.0, x.sum()


def right_where_unknown(x: T["?", 768], y: T["?", 768], table) -> T["?", 768]:
    return x + y + table["anything"][3]


def right_as_divided(x: T["B", "D"]):
    return x.reshape(x.shape[0], 4, x.shape[1] // 4)


@pytest.mark.parametrize("function", [f for n, f in list(globals().items()) if n.startswith("right")])
def test_right_programs(function):
    assert ts.check(function).ok, str(ts.check(function))


def wrong_recursion(x: T["B", 4], y: T["B", 5]):
    return total({"a": {"b": x + y}})


def wrong_gradient(x: T["B", 8], y: T["B", 4]):
    return ts.grad(loss)({"w1": ts.zeros((8, 16)), "w2": ts.zeros((15, 4))}, x, y)


@pytest.mark.parametrize("function", [wrong_recursion, wrong_gradient])
def test_errors_beside_recursion_and_gradients_are_found(function):
    (finding,) = ts.check(function).findings
    assert finding.title == "Shape mismatch" and finding.function == function.__name__


@ts.kernel
def needs_equal_sizes(x: T["M"], y: T["N"]):
    tile.store(y[:], x[0 : y.shape[0]])


@ts.kernel
def needs_a_constant(x: T["N"], *, BLOCK: ts.constexpr):
    tile.store(x[0:BLOCK], x[0:BLOCK] + x[0 : 2 * BLOCK])


@ts.kernel
def needs_small_sizes(x: T["M", "N"], out: T["M", "N"]):
    held = tile.alloc_shared((32, 33), ts.f32)
    held[0:M, 0:N] = x
    tile.store(out, held[0:M, 0:N])


def raises():
    raise KeyError("nothing")


@ts.kernel
def calls_what_raises(x: T["N"]):
    x[0] = raises()


def test_sizes_that_a_kernel_is_not_for_are_no_errors():
    report = ts.check(needs_small_sizes)
    assert report.ok and report.notes[0].startswith("needs_small_sizes: where M = 64, N = 128: ")


def test_an_exception_of_a_function_that_a_kernel_calls_is_a_finding():
    (finding,) = ts.check(calls_what_raises).findings
    assert "nothing" in finding.message


def test_kernels():
    report = ts.check(needs_a_constant)
    assert report.ok and not report.typed and "BLOCK has no type" in report.notes[0]
    (finding,) = ts.check(needs_a_constant, BLOCK=16).findings
    line = needs_a_constant.kernel_function.__code__.co_firstlineno + 2
    assert (finding.title, finding.location.line) == ("Shape mismatch", line)
    assert ts.check(needs_a_constant, np.ones(4, np.float32), BLOCK=16).findings
    report = ts.check(needs_equal_sizes)
    assert report.ok, str(report)
    with pytest.raises(ts.errors.ArgumentError, match="needs_a_constant"):
        ts.check(needs_a_constant, T[4], T[4], T[4])


def test_what_is_not_known_is_noted():
    (note,) = ts.check(right_where_unknown).notes
    assert note == "right_where_unknown: table has no type: what follows from it is not checked"
    (note,) = ts.check(right_as_divided).notes
    assert "the remainder is not known" in note and note.startswith("test_check.py:")


def wrong_for_any_size(x: T["?", 768], w: T[512, 10]):
    return x @ w


def test_an_unnamed_size_is_wrong_only_where_none_fits():
    (finding,) = ts.check(wrong_for_any_size).findings
    assert finding.received == 'Tensor["?", 768] and Tensor[512, 10]'


def test_types_given_are_held_against_the_annotations():
    assert ts.check(right_with_names, T[4, 3], T[3, 8]).ok
    (finding,) = ts.check(right_with_names, T[4, 3], np.zeros((2, 8), np.float32)).findings[:1]
    assert finding.message == "argument w: axis 0: D is 3 elsewhere and 2 here"
    assert not ts.check(right_with_names, T[4, 3], T[3, 7]).ok
    with pytest.raises(ArgumentError, match="too many positional arguments"):
        ts.check(right_with_names, 1, 2, 3)


def crashes(x: T["B"]):
    first, second = x.shape
    return x


def test_an_error_of_python_is_a_finding_too():
    (finding,) = ts.check(crashes).findings
    assert finding.title == "ValueError" and finding.function == "crashes" and "unpack" in finding.message


def keeps_exceptions(x: T["B"], table: dict = {}):  # noqa: B006
    try:
        return table["missing"]
    except KeyError:
        return x + x


def test_a_programs_own_handlers_work():
    assert ts.check(keeps_exceptions).ok


@pytest.mark.skipif(sys.version_info < (3, 12), reason="type parameters came with Python 3.12")
def test_type_parameters_are_sizes(tmp_path):
    file = tmp_path / "generic.py"
    file.write_text(
        "from tessera import Tensor\n\n"
        "def right[B, S](x: Tensor[B, S], y: Tensor[S]) -> Tensor[B, S]:\n    return x + y\n\n"
        "def wrong[B, S](x: Tensor[B, S], y: Tensor[B]) -> Tensor[B, S]:\n    return x + y\n"
    )
    module = load(file)
    assert ts.check(module.right).ok
    (finding,) = ts.check(module.wrong).findings
    assert finding.message == "cannot broadcast S with B in dimension 1"
    assert finding.fixes[0] == "Add the missing axis: ts.expand_dims(y, -1)"


def right_neighbours(x: T["B", "S"]) -> T["B", "S-1"]:
    return x[:, 1:] - x[:, :-1]


def right_halves(x: T["B", "2*D"]) -> T["B", "D"]:
    half = x.shape[1] // 2
    return x[:, :half] * x[..., half:]


def right_update(x: T["B", "S"], v: T["B"]) -> T["B", "S"]:
    return x.at[:, 0].set(v).at[:, 1:].add(1.0)


def wrong_neighbours(x: T["B", "S"]) -> T["B", "S"]:
    return x[:, 1:] * x


def unknown_slice(x: T["B", "S"]) -> T["B", 4]:
    return x[:, :4]


def test_slices_of_sizes_known_by_name():
    for function in (right_neighbours, right_halves, right_update):
        assert ts.check(function).ok, str(ts.check(function))
    (finding,) = ts.check(wrong_neighbours).findings
    assert finding.message == "cannot broadcast S-1 with S in dimension 1"
    assert ts.check(unknown_slice).ok and "size" in ts.check(unknown_slice).notes[0]
    compiled = ts.jit(right_halves)(np.arange(8, dtype=np.float32).reshape(2, 4))
    assert compiled.tolist() == [[0.0, 3.0], [24.0, 35.0]]


def test_functions_with_declared_effects_are_checked():
    @ts.function
    def wrong(x: T["B", "D"]) -> T["B", "D"]:
        return ts.sum(x, axis=-1)

    @ts.effects(["random"])
    def drawn(x: T[2, 3]) -> T[2]:
        return x + ts.rand(x.shape)

    for function in (wrong, drawn, ts.jit(drawn)):
        assert "does not return what it says" in str(ts.check(function))


DRAWS = {
    "rand": lambda x: x + ts.rand(x.shape),
    "rand of f64": lambda x: x + ts.cast(ts.rand(x.shape, ts.f64), dtype=ts.f32),
    "randn": lambda x: x + ts.randn(x.shape),
    "randint": lambda x: x + ts.cast(ts.randint(0, 3, x.shape), dtype=ts.f32),
    "bernoulli": lambda x: ts.where(ts.bernoulli(0.5, x.shape), x, 0.0),
    "dropout": lambda x: ts.dropout(x, 0.5),
    "permutation": lambda x: x[ts.permutation(x.shape[0])],
    "loop": lambda x: ts.scan(lambda c, row: (c, row + ts.rand(row.shape)), 0.0, x)[1],
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_of_symbolic_sizes_have_types(draw):
    def right(x: T["B", "D"]) -> T["B", "D"]:
        return draw(x)

    def wrong(x: T["B", "D"]) -> T["B"]:
        return draw(x)

    assert ts.check(right).ok, str(ts.check(right))
    assert "does not return what it says" in str(ts.check(wrong))


def test_unknown_containers_are_unpacked():
    def body(params, pairs, x: T["B", "D"]) -> T["B"]:
        (a, b), c = params["three"]
        c = c + [p - b for name, p in params.items()][0]
        for number, (left, right) in enumerate(pairs):
            a = a + left * right * number
        for first, *_rest in pairs:
            c = c + first
        return x * 2.0

    (finding,) = ts.check(body).findings  # the result alone is wrong
    assert "does not return what it says" in finding.message


def halves(x: ts.Tensor["B", 8]):
    return ts.split(x, 2)[0] + x.reshape(2, -1, 8)[1]


@ts.require("B % 4 == 0")
def quarters(x: ts.Tensor["B", 8]):
    return x.reshape(x.shape[0] // 4, 4, 8).sum(1) + x[::4]


def stated_inside(x: ts.Tensor["B", 8]):
    ts.require("B % 6 == 0 and B >= 12")
    return ts.topk(x, 12, axis=0)[0].sum() + x.reshape(x.shape[0] // 6, 48).sum()


@ts.require("B % 4 == 0")
def two_parts(x: ts.Tensor["B", 8]):
    return x.reshape(-1, 4, 8).sum(1) + x.reshape(-1, 2, 8).sum(1)


@pytest.mark.parametrize("function", [halves, quarters, stated_inside])
def test_constraints_on_sizes_are_known(function):
    """Also those that an op makes by dividing: the function is right for sizes that are multiples."""
    report = ts.check(function)
    assert report.ok and "remainder" not in str(report)


def test_quotients_that_differ():
    report = ts.check(two_parts)
    assert not report.ok and "Cannot broadcast B/4 with B/2 in dimension 0." in str(report)
