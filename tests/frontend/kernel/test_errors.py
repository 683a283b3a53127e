"""What a kernel author reads after a mistake: where it is, what was expected, what came, what to do."""

import re

import numpy as np
import pytest

import tessera as ts
from tessera import tile
from tessera.core.errors import ArgumentError, TesseraError
from tessera.core.types import bf16, f32
from tessera.frontend.kernel import kernel
from tessera.ir.tensor import Tensor
from tessera.ops.tensor.shape import pad

TABLE = np.arange(8, dtype="f4")


def no_value(x: Tensor["N"]):
    y = exps(x[0])


def no_attribute(x: Tensor["N"]):
    y = tile.laod(x)


def no_method(x: Tensor["N"]):
    y = x[0:4].sqroot()


def in_a_try(x: Tensor["N"]):
    try:
        x[0] = 1.0
    except ValueError:
        pass


def imported(x: Tensor["N"]):
    import math


def starred(x: Tensor["N"]):
    y = max(*x)


def negative_index(x: Tensor["N"]):
    x[-1] = 1.0


def far_index(x: Tensor["N"]):
    y = x[2:5] + x[8]


def far_block(x: Tensor["N"]):
    y = tile.load(x[4:12])


def slice_of_unknown_size(x: Tensor["N"]):
    i = tile.program_id(0)
    y = x[i : min(i + 4, N)]


def too_many_indices(x: Tensor["N"]):
    y = x[0, 1]


def float_index(x: Tensor["N"]):
    y = x[x[0]]


def break_out(x: Tensor["N"]):
    for i in tile.range(N):
        if x[i] > 0.5:
            break


def endless(x: Tensor["N"]):
    while True:
        x[0] = 1.0


def changed_type(x: Tensor["N"]):
    total = 0.5
    for i in tile.range(N):
        total = i + 1
    x[0] = total


def changed_in_a_branch(x: Tensor["N"]):
    place = tile.cast(x[0], "int32")
    if place == 0:
        place = tile.program_id(0)
    x[place] = 1.0


def changed_shape(x: Tensor["N"]):
    acc = x[0]
    for i in tile.range(2):
        acc = acc + x[0:4]
    x[0:4] = acc


def one_branch(x: Tensor["N"]):
    if x[0] > 0.0:
        y = 1.0
    x[0] = y


def only_in_the_loop(x: Tensor["N"]):
    for i in tile.range(N):
        y = x[i]
    x[0] = y


def block_as_condition(x: Tensor["N"]):
    if x[0:4] > 0.0:
        x[0] = 1.0


def mixed_floats(x: Tensor["N"]):
    y = x[0] + tile.zeros((), bf16)


def stored_as_another_float(x: Tensor["N"]):
    x[0:4] = tile.zeros((4,), bf16)


def stored_integer(x: Tensor["N"]):
    x[0] = tile.program_id(0)


def stored_shape(x: Tensor["N"]):
    x[0:4] = tile.zeros((5,))


def stored_too_much(x: Tensor["N"]):
    tile.store(x[0:4], tile.zeros((5,)))


def part_of_a_value(x: Tensor["N"]):
    y = tile.load(x)
    x[0] = tile.sum(pad(y, low=(1,), high=(1,)))


def written_value(x: Tensor["N"]):
    y = tile.load(x)
    y[0] = 1.0


def outside_array(x: Tensor["N"]):
    y = tile.load(x) + TABLE


def failed_assertion(x: Tensor["N"]):
    assert N % 3 == 0, f"N = {N} is not a multiple of 3"


def traced_assertion(x: Tensor["N"]):
    assert x[0] > 1.0


def divided(x: Tensor["N"]):
    y = N / 0


def numpy_function(x: Tensor["N"]):
    y = np.fft.fft(x[0])


def helper(v):
    return v + undefined


def in_a_device_function(x: Tensor["N"]):
    x[0] = helper(x[0])


def list_of_numbers(x: Tensor["N"]):
    stages = [1.0, 2.0]
    x[0] = stages[tile.program_id(0)]


def mask_of_floats(x: Tensor["N"]):
    y = tile.load(x, tile.arange(0, 4), mask=x[0:4])


def shape_of_a_product(x: Tensor["N"]):
    block = tile.zeros((4, 8))
    y = tile.dot(block, block)


def wrong_block(x: Tensor["N"]) -> Tensor["N", bf16]:
    return x[0:4]


def wrong_rank(x: Tensor["N"]) -> Tensor["N", "M"]:
    return x[0:4]


def wrong_result(x: Tensor["N"]) -> bf16:
    return x[0]


def unpacked(x: Tensor["N"]):
    a, b = tile.load(x[0:2])


def dynamic_buffer(x: Tensor["N"]):
    buffer = tile.alloc_shared((tile.program_id(0),), f32)


def compared_with_a_shape(x: Tensor["N"]):
    i = tile.arange(0, 4)
    x[0:4] = tile.load(x[0:4], mask=i < x.shape, other=0.0)


def number_compared_with_a_shape(x: Tensor["N"]):
    if 4 < x.shape:
        x[0] = 1.0


def added_to_a_list(x: Tensor["N"]):
    x[0] = x[0] + [1.0, 2.0]


def infinite_other(x: Tensor["N"]):
    x[0:4] = tile.load(x[0:4], mask=tile.arange(0, 4) < 3, other="inf")


def longer_list(x: Tensor["N"]):
    parts = [tile.load(x[0])]
    for i in tile.range(N):
        parts = [parts[0], tile.load(x[i])]
    x[0] = parts[0]


def other_items(x: Tensor["N"]):
    parts = [tile.load(x[0]), tile.load(x[1])]
    for i in tile.range(N):
        parts = [parts[0], i]
    x[0] = parts[1]


# A kernel, the kind of error, what the caret underlines, and what the text says.
CASES = [
    (compared_with_a_shape, "DTypeError", "i < x.shape", "a block with the shape `x.shape`", "x.shape[0]"),
    (number_compared_with_a_shape, "DTypeError", "4 < x.shape", "a number with the shape `x.shape`", "x.shape[0]"),
    (added_to_a_list, "DTypeError", "x[0] + [1.0, 2.0]", "combine a number with `[1.0, 2.0]`", "[1.0, 2.0][0]"),
    (infinite_other, "DTypeError", None, "cannot store a str into `other` of x", "write the number: float('inf')"),
    (no_value, "UnknownNameError", "exps", "`exps` is not defined", "did you mean `ts.exp`?"),
    (no_attribute, "UnknownNameError", "tile.laod", "`tile` has no `laod`", "did you mean `load`?"),
    (no_method, "UnknownNameError", "x[0:4].sqroot", "a tensor has no `sqroot`", "did you mean `sqrt`?"),
    (in_a_try, "UnsupportedSyntaxError", "t", "try is not part of the kernel language", "mask the access"),
    (imported, "UnsupportedSyntaxError", "import math", "import is not part", "import at the top of the file"),
    (starred, "UnsupportedSyntaxError", "*x", "a starred expression is not part", "one by one"),
    (negative_index, "OutOfBoundsError", "x[-1]", "index -1 is outside axis 0 of x", "count from the start: 7"),
    (far_index, "OutOfBoundsError", "x[8]", "index 8 is outside axis 0 of x, which has size 8", "from 0 to 7"),
    (far_block, "OutOfBoundsError", "tile.load(x[4:12])", "the block 4:12 of x is outside axis 0", 'edge="clip"'),
    (slice_of_unknown_size, "ShapeError", "x[i : min(i + 4, N)]", "not known while compiling", "BLOCK]"),
    (too_many_indices, "ShapeError", "x[0, 1]", "2 indices for x, which has rank 1", "received: (8,)"),
    (float_index, "DTypeError", "x[x[0]]", "an index into x is not an integer", "received: f32"),
    (break_out, "UnsupportedSyntaxError", "break", "break under a condition known only at run time", "use `while`"),
    (endless, "UnsupportedSyntaxError", "w", "does not end within 4096 steps", "tile.range(n)"),
    (changed_type, "DTypeError", "total", "the loop variable `total` changes its type", "received: int64"),
    (changed_in_a_branch, "DTypeError", None, "`place` changes its type", "expected: int32"),
    (changed_shape, "ShapeError", "acc", "the loop variable `acc` changes its shape", "received: 4xf32"),
    (longer_list, "DTypeError", "parts", "`parts` changes its kind or length", "received: a list of 2"),
    (other_items, "DTypeError", "parts", "the loop variable `parts[1]` changes its type", "received: int64"),
    (one_branch, "UnknownNameError", "y", "`y` may have no value here", "give `y` a value before the `if`"),
    (only_in_the_loop, "UnknownNameError", "y", "`y` may have no value here", "give `y` a value before the loop"),
    (block_as_condition, "ShapeError", "x[0:4] > 0.0", "a block is not one truth value", "tile.where"),
    (mixed_floats, "DTypeError", "x[0] + tile.zeros((), bf16)", "cannot mix bf16 and f32", "cast one of them"),
    (stored_as_another_float, "DTypeError", "x[0:4]", "cannot store bf16 into x, which", "tile.cast(value, ts.f32)"),
    (stored_integer, "DTypeError", "x[0]", "cannot store int64 into x", "received: int64"),
    (stored_shape, "ShapeError", "x[0:4]", "shape (5,) does not fit into x", "expected: shape (4,)"),
    (stored_too_much, "ShapeError", None, "shape (5,) does not fit into x", "expected: shape (4,)"),
    (part_of_a_value, "UnsupportedOpError", "pad(y, low=(1,), high=(1,))", "pad does not exist on", "zeros outside"),
    (written_value, "UnsupportedSyntaxError", "y[0]", "a block of values cannot be assigned to", "tile.where"),
    (outside_array, "UnsupportedSyntaxError", "tile.load(x) + TABLE", "an array from outside", "as an argument"),
    (failed_assertion, "ArgumentError", None, "assertion failed: N = 8 is not a multiple of 3", ""),
    (traced_assertion, "ExecutionError", None, "assertion failed: x[0] > 1.0", "false at program (0,)"),
    (divided, "ArgumentError", "N / 0", "ZeroDivisionError: division by zero", ""),
    (numpy_function, "UnsupportedSyntaxError", "np.fft.fft(x[0])", "fft cannot run on a value", "tile function"),
    (in_a_device_function, "UnknownNameError", "undefined", "`undefined` is not defined", ""),
    (list_of_numbers, "UnsupportedSyntaxError", "stages[tile.program_id(0)]", "a list is", "tile.static_range"),
    (mask_of_floats, "DTypeError", None, "the mask is not bool", "mask=offsets < N"),
    (shape_of_a_product, "ShapeError", "tile.dot(block, block)", "do not fit a matrix product", "(8, N) on"),
    (wrong_block, "DTypeError", "return x[0:4]", "returns another element type", "tile.cast(value, ts.bf16)"),
    (wrong_rank, "ShapeError", "return x[0:4]", "rank 2 expected, rank 1 received", "or the return annotation"),
    (wrong_result, "DTypeError", "return x[0]", "returns another element type", "tile.cast(value, ts.bf16)"),
    (unpacked, "UnsupportedSyntaxError", "a, b", "a block cannot be unpacked", "received: 2xf32"),
    (dynamic_buffer, "ArgumentError", None, "the shape of a buffer is not known while compiling", "a constant"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "kind", "caret", "message", "advice"), CASES, ids=[c[0].__name__ for c in CASES])
def test_errors(function, kind, caret, message, advice):
    with pytest.raises(TesseraError) as caught:
        kernel(function)[1](np.ones(8, "f4"))
    text = str(caught.value)
    place = re.match(r".*test_errors\.py:(\d+):\d+: (\w+): ", text)
    assert place and place[2] == kind
    assert message in text and advice in text
    code = function if function is not in_a_device_function else helper
    assert int(place[1]) > code.__code__.co_firstlineno
    assert caret is None or underlined(text) == caret


def copy_half(x, y):
    first = tile.program_id(0) * 4
    tile.store(y[first : first + 8], tile.load(x[first : first + 4]))


def copy_rows(x, y):
    tile.store(y[0:4], tile.reshape(tile.load(x[0:4]), (2, 2)))


@pytest.mark.parametrize(
    ("function", "x", "y", "message", "advice"),
    [
        (copy_half, np.ones(8, "f4"), np.ones(8, "f4"), "does not fit into y", "y[i : i + 4]"),
        (copy_rows, np.ones(8, "f4"), np.ones(8, "f4"), "does not fit into y", "tile.reshape(block, (4,))"),
        (copy_half, [1.0] * 8, np.ones(8, "f4"), "a list, which is a constant of the kernel", "np.asarray(...) of it"),
        (copy_half, np.ones(8, "f4"), None, "this is None, which has no elements", "if x is not None"),
    ],
)
def test_advice_on_memories(function, x, y, message, advice):
    with pytest.raises(TesseraError) as caught:
        kernel(function)[1](x, y)
    assert message in str(caught.value) and advice in caught.value.suggestion


def underlined(text):
    """What the caret line of an error marks."""
    _, line, carets, *_ = text.split("\n")
    start = carets.index("^")
    return line[start : start + carets.count("^")]


def test_tile_functions_need_a_kernel():
    with pytest.raises(TesseraError, match="tile.program_id has a meaning only inside a kernel"):
        tile.program_id(0)
    with pytest.raises(TesseraError, match="tile.load has a meaning only inside a kernel"):
        tile.load(np.ones(3))


def test_a_kernel_without_source():
    tile = {}
    exec("def nowhere(x): x[0] = 1.0", tile)
    with pytest.raises(TesseraError, match="the source of nowhere cannot be read"):
        kernel(tile["nowhere"])(np.ones(1, "f4"))


@ts.kernel
def converts_by_the_type(x, y):
    y[0] = ts.f64(2.0)


@ts.kernel
def slices_by_a_float(x, y):
    i = tile.program_id(0) / 2
    y[0] = tile.sum(x[i : i + 4])


@ts.kernel
def masks_another_shape(x, y):
    y[0:8] = tile.load(x[0:8], mask=tile.arange(0, 4) < 2)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (converts_by_the_type, r"ts\.f64 is an element type, not a function[^$]*x\.to\(ts\.f64\)"),
        (slices_by_a_float, r"is not an integer[^$]*// instead of /"),
        (masks_another_shape, r"the mask and `other` the shape of the accessed block"),
    ],
)
def test_the_advice_names_the_cause(body, says):
    with pytest.raises(TesseraError, match=says):
        body[(1,)](np.zeros(16, "f4"), np.zeros(16, "f4"))


def test_a_missing_memory_is_explained():
    with pytest.raises(ArgumentError, match=r"ts\.launch takes new memory: y=ts\.like\(x\)"):
        ts.launch(slices_by_a_float, (1,), np.zeros(16, "f4"))
