"""Inputs of torch.compile with gaps between their elements are read where they lie; other memory is copied first."""

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402
from tessera.torch.input_layouts import find_layout, holds_enclosing  # noqa: E402

NAN = float("nan")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    ts.torch.reset_report()


def place(sizes, strides, offset=0, room=64):
    """Whole numbers of these sizes and strides, in memory that holds NaN elsewhere and `room` elements behind them."""
    last = sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    memory = torch.full((offset + last + 1 + room,), NAN)
    once = [n if s else 1 for n, s in zip(sizes, strides, strict=True)]
    written = memory.as_strided(once, strides, offset)
    written.copy_(torch.arange(written.numel()).reshape(once).remainder(17) - 8)
    return memory.as_strided(sizes, strides, offset)


def compute(x):
    """What reads each element at its place, along rows and columns, and beside padding."""
    return x.abs() + 1, x.sum(-1), x.amax(0), torch.nn.functional.pad(x, (1, 2)).flip(-1)


def compile_it(function):
    return torch.compile(function, backend="tessera", dynamic=False, options={"fallback": False})


def check(compiled, function, *tensors):
    for found, wanted in zip(compiled(*tensors), function(*tensors), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def count_copies(compiled, *tensors):
    with torch.profiler.profile() as profile:
        compiled(*tensors)
    return sum(event.count for event in profile.key_averages() if event.key in ("aten::copy_", "aten::clone"))


GAPS = {  # sizes and strides, and the array that they are a slice of
    "columns": ((4, 5), (8, 1), (4, 8)),
    "rows of several axes": ((3, 2, 5), (20, 5, 1), (3, 4, 5)),
    "axes that follow each other": ((3, 4, 2, 5), (48, 10, 5, 1), (3, 48)),
    "every other element": ((7, 4), (8, 2), (7, 4, 2)),
    "turned": ((5, 4), (1, 8), (4, 8)),
    "turned, with steps": ((3, 5, 2), (2, 8, 40), (2, 5, 4, 2)),
    "repeated": ((4, 3, 5), (8, 0, 1), (4, 8, 1)),
    "one row": ((1, 5, 3), (7, 4, 1), (1, 5, 4)),
}


@pytest.mark.parametrize("name", GAPS)
def test_tensors_with_gaps_are_read_where_they_lie(name):
    sizes, strides, enclosing = GAPS[name]
    x = place(sizes, strides)
    assert find_layout(x).enclosing == enclosing
    compiled = compile_it(compute)
    check(compiled, compute, x)
    assert count_copies(compiled, x) == 0
    assert ts.torch.report().programs == 1


def sum_rows(x):
    return x + 1, x.sum(-1)


OTHERS = {  # which are slices of no array
    "no gaps": ((4, 5), (5, 1)),
    "turned without gaps": ((4, 5), (1, 4)),
    "rows that overlap": ((4, 5), (3, 1)),
    "strides that do not divide": ((4, 3), (7, 2)),
    "empty": ((0, 5), (8, 1)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_tensors_are_copied(name):
    sizes, strides = OTHERS[name]
    x = torch.arange(40.0).as_strided(sizes, strides)
    assert find_layout(x).enclosing is None
    check(compile_it(sum_rows), sum_rows, x)


@pytest.mark.parametrize(
    "later", [place((4, 5), (8, 1), room=0), place((4, 5), (8, 1), offset=1)], ids=["end", "start"]
)
def test_memory_that_ends_early_or_begins_anywhere_has_a_program_of_its_own(later):
    compiled = compile_it(compute)
    for x, programs in ((place((4, 5), (8, 1)), 1), (later, 2), (place((4, 5), (8, 1)), 2), (later, 2)):
        check(compiled, compute, x)
        assert ts.torch.report().programs == programs


def test_tensors_of_other_strides_lie_in_no_such_array():
    layout = find_layout(place((4, 5), (8, 1)))
    assert [holds_enclosing(place((4, 5), strides), layout, 4) for strides in ((8, 1), (9, 1), (8, 2))] == [1, 0, 0]


def test_later_calls_may_have_other_strides():
    compiled = compile_it(compute)
    for strides in ((8, 1), (5, 1), (12, 2), (1, 4), (1, 8), (8, 1)):
        check(compiled, compute, place((4, 5), strides))


def multiply(x, y):
    return (x @ y,)


def test_products_take_copies():
    x, y = place((4, 5), (8, 1)), place((5, 3), (3, 1))
    compiled = compile_it(multiply)
    check(compiled, multiply, x, y)
    assert count_copies(compiled, x, y) > 0


def write_columns(x, y):
    """Columns of an array are written; the columns beside them are read."""
    return x.mul_(2).add_(y), x.sum(0)


def test_what_lies_in_gaps_is_kept():
    compiled = compile_it(write_columns)
    for _ in range(2):
        ours, wanted = (torch.arange(64.0).reshape(4, 16) for _ in range(2))
        found, expected = compiled(ours[:, :5], ours[:, 8:13]), write_columns(wanted[:, :5], wanted[:, 8:13])
        torch.testing.assert_close([*found, ours], [*expected, wanted], rtol=0, atol=0)


def gate(x):
    value, gates = x.chunk(2, -1)
    return value * torch.nn.functional.silu(gates)


def test_gradients_with_gaps():
    """What autograd hands over is a slice, too."""
    x, cotangent = place((6, 8), (12, 1)) / 4, place((6, 4), (7, 1))
    found, wanted = (
        torch.autograd.grad(function(given), given, cotangent)
        for function, given in ((f, x.detach().requires_grad_()) for f in (compile_it(gate), gate))
    )
    torch.testing.assert_close(found, wanted)
