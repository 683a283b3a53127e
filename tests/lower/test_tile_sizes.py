"""Tile sizes: the axis along which programs and vectors run."""

import math

import numpy as np
import pytest

import tessera as ts
from tessera.ops.dialects import schedule
from tessera.runtime.driver import lower, run_level


def choose(function, *shapes, target="llvm"):
    """The dims of the kernel of a function, each with its tile."""
    traced = ts.jit(function).trace(*(np.zeros(s, np.float32) for s in shapes))
    kernel = next(n for n in lower(traced.function, target)["schedule"].main.body.nodes if n.op is schedule.kernel)
    return [
        (n, kind, t) for (_, n, kind), t in zip(kernel.attrs["dims"], kernel.attrs["schedule"]["tile"], strict=True)
    ]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, w: x @ w, [(4112,), (4112, 999)]),
        (lambda x, m: ts.sum(x * ts.expand_dims(m, 1), axis=0), [(4112, 999), (4112,)]),
    ],
    ids=["vector times matrix", "weighted rows"],
)
def test_lanes_run_along_the_contiguous_axis_of_the_largest_operand(function, shapes):
    lanes = [t for n, kind, t in choose(function, *shapes) if kind == "parallel" and n == 999]
    assert lanes[0] >= 64  # the vector is contiguous along the summed axis, the matrix along the other


def test_rows_are_summed_along_themselves():
    rows, columns = choose(lambda x: ts.sum(x, axis=1), (999, 4112))
    assert columns == (4112, "reduce", 4112)
    assert rows[2] <= 2


@pytest.mark.parametrize(("columns", "rows"), [(1000, 8), (2048, 4), (4096, 1)])
def test_a_program_sums_a_row_for_each_warp_where_rows_are_many(columns, rows):
    """As long as at least four rows of a program have 8,192 elements at most."""
    (_, _, together), _ = choose(lambda x: ts.sum(x, axis=1), (100_000, columns), target="ptx")
    assert together == rows


def test_norms_over_outer_axes_recompute_differences_from_the_mean():
    """A difference takes as long to compute from its operands as to read: it has no memory of its own."""
    x = np.zeros((8, 16, 20, 20), np.float32)
    traced = ts.jit(
        lambda x: ts.var(x, axis=(0, 2, 3), keepdims=True) + (x - ts.mean(x, axis=(0, 2, 3), keepdims=True))
    )
    workspace = lower(traced.trace(x).function, "llvm")["tile"].main.attrs["workspace"]
    assert workspace < x.nbytes // 8


def count_packed(function, *shapes):
    """How often the programs of a product read an element of its right operand, and how many programs there are."""
    tiles = [(n, t) for n, kind, t in choose(function, *shapes) if kind == "parallel"]
    (m, rows), (n, columns) = tiles
    return -(-m // rows), -(-m // rows) * -(-n // columns)


@pytest.mark.parametrize(("m", "k", "n"), [(77, 13714, 181), (28, 11008, 77), (60, 4096, 250)])
def test_products_of_few_results_pack_the_right_operand_once(m, k, n):
    """Rows are not divided where packing costs more than that some threads have no program."""
    reads, programs = count_packed(lambda x, w: x @ w, (m, k), (k, n))
    assert reads == 1
    assert programs > 1


def test_products_with_many_rows_divide_them():
    reads, programs = count_packed(lambda x, w: x @ w, (512, 512), (512, 32))
    assert reads > 1
    assert programs >= 4


def test_programs_of_narrow_operands_hold_more_rows():
    """Four bytes are multiplied at once, but packed one by one."""
    given = [np.zeros(size, np.int8) for size in ((349, 4824), (4824, 840))]
    function = ts.jit(lambda a, b: ts.matmul(a, b, dtype=ts.int32)).trace(*given).function
    kernel = next(n for n in lower(function, "llvm")["schedule"].main.body.nodes if n.op is schedule.kernel)
    assert kernel.attrs["schedule"]["tile"][0] == 349


def test_rows_of_products_are_divided_with_least_padding():
    (_, _, rows), *_ = choose(lambda a, b: a @ b, (349, 1000), (1000, 840))
    assert -(-349 // rows) * rows - 349 <= 2


@pytest.mark.parametrize(("m", "k", "n"), [(160, 1117, 323), (74, 84, 80), (6061, 353, 265)])
def test_columns_of_products_are_whole_registers_and_pad_little(m, k, n):
    """Tiles of 19, a divisor of 323, would fill two registers of 16 lanes; two of 256 would compute 512 of 265."""
    _, (_, _, columns), *_ = choose(lambda a, b: a @ b, (m, k), (k, n))
    assert columns % 16 == 0
    assert -(-n // columns) * columns <= 1.25 * n


def choose_for_gpu(function, *shapes):
    """The tiles of the kernels of a function on GPUs, with the dims that loops walk."""
    traced = ts.jit(function).trace(*(np.zeros(s, np.float16) for s in shapes))
    kernels = [n for n in lower(traced.function, "ptx")["schedule"].main.body.nodes if n.op is schedule.kernel]
    return [dict(zip([d[0] for d in n.attrs["dims"]], n.attrs["schedule"]["tile"], strict=True)) for n in kernels]


def test_programs_of_few_columns_add_up_many_rows_in_a_round():
    *_, last = choose_for_gpu(lambda x: ts.sum(x, axis=0), (8192, 768))
    assert last["i0"] == 8 and last["r0"] >= 64  # of the sums of parts


def choose_block(m, k, n, function=lambda a, b: a @ b, dtype=np.float16, target="ptx:sm_90a"):
    """The rows and columns of a block of a product [m, k] . [k, n]."""
    traced = ts.jit(function).trace(np.zeros((m, k), dtype), np.zeros((k, n), dtype))
    kernel = next(x for x in lower(traced.function, target)["schedule"].main.body.nodes if x.op is schedule.kernel)
    dims = zip(kernel.attrs["dims"], kernel.attrs["schedule"]["tile"], strict=True)
    return tuple(t for (_, _, kind), t in dims if kind == "parallel")


@pytest.mark.parametrize(
    ("sizes", "block"),
    [
        ((768, 8192, 3072), (128, 160)),  # 120 programs for 132 processors
        ((3136, 4096, 1024), (64, 128)),
        ((512, 768, 768), (64, 64)),  # not 32 x 64, which is no warp group's
        ((2048, 8192, 1536), (128, 192)),
        ((12544, 1000, 384), (64, 192)),
        ((4096, 4096, 4096), (128, 256)),
        ((8192, 768, 3072), (128, 128)),  # short contractions: the other team stores
    ],
)
def test_blocks_whose_waves_take_least_time(sizes, block):
    assert choose_block(*sizes) == block


def test_blocks_of_other_products_have_powers_of_two():
    assert choose_block(3136, 4096, 1024, target="ptx:sm_80") == (128, 256)
    assert choose_block(3136, 4096, 1024, lambda a, b: ts.gelu(a @ b)) == (128, 128)


def test_blocks_of_products_fill_the_last_wave_of_programs():
    """192 blocks of 256 columns take two rounds of 132 programs, 384 of 128 columns take less than twice as many."""
    sizes = ((2048, 768), (2048, 3072), (1024, 3072))  # short contractions overlap what follows them
    found = [choose_for_gpu(lambda x, w: x @ w, (8192, k), (k, n)) for k, n in sizes]
    assert [tiles["i1"] for (tiles,) in found] == [128, 256, 128]


def find_block(m, k, n, dtype=ts.bf16, target="ptx"):
    """The rows of a block of a product on a target."""
    operands = [np.zeros(s, dtype.numpy) for s in ((m, k), (k, n))]
    levels = lower(ts.jit(lambda x, w: x @ w).trace(*operands).function, target)
    kernel = next(n for n in levels["schedule"].main.body.nodes if n.op is schedule.kernel)
    return kernel.attrs["schedule"]["tile"][0]


@pytest.mark.parametrize("m", [17, 40, 63])
def test_blocks_of_few_rows_are_those_of_a_warp_group(m):
    assert find_block(m, 512, 16384) == 64
    assert find_block(m, 512, 40) <= m  # the right operand is small, too
    assert find_block(m, 24, 16384, ts.f32) == m
    assert find_block(16, 512, 16384) == 16  # an instruction of a warp has as many rows
    assert find_block(640, 512, 128) < 64  # one of several blocks: there would be fewer programs


def test_long_rows_that_are_walked_twice_have_shorter_tiles_on_a_gpu():
    """Several programs share a multiprocessor: one reads while another computes. A row that is read once is added up
    in registers, round by round, and its tiles are shorter still."""
    once, twice, through_log = (
        choose(f, (4096, 50304), target="ptx")[1][2]
        for f in (
            lambda x: ts.max(x, axis=1),
            lambda x: ts.sum(ts.exp(x / ts.max(x, axis=1, keepdims=True)), axis=1),
            lambda x: ts.sum(ts.log(x), axis=1),
        )
    )
    assert once == through_log == 4096 and twice == 8192


def test_programs_of_narrow_types_hold_more_elements_where_there_are_many():
    """A program of a GPU costs about as much time as 5 KB take; its threads write whole sectors."""
    found = [
        choose_for_gpu(lambda x, to=to: ts.cast(x, to), (n,))[0]["i0"]
        for to, n in ((ts.fp8_e4m3, 1 << 24), (ts.f32, 1 << 24), (ts.fp8_e4m3, 1 << 20), (ts.fp8_e4m3, 1 << 19))
    ]
    assert found == [4096, 2048, 2048, 1024]


def test_more_elements_of_a_program_pad_no_rows():
    """Of 2,049 columns two tiles of 2,048 would be twice as many elements as three of 1,024 have."""
    for columns, tile in ((2048, 2048), (2049, 1024)):
        assert choose(lambda x: ts.roll(ts.cast(x, "bf16"), 7, axis=1), (2048, columns), target="ptx")[-1][2] == tile


def test_a_program_holds_two_of_an_outer_axis_beside_half_of_an_inner_one():
    """Of 22 rows a tile has two, since that divides them, and then two images."""
    twice = lambda x: ts.interpolate(x, scale_factor=2)  # noqa: E731
    assert [t for _, _, t in choose(twice, (1, 750, 11, 128), target="ptx")] == [1, 2, 2, 256]
    assert [t for _, _, t in choose(twice, (1, 750, 12, 128), target="ptx")] == [1, 1, 4, 256]


def test_programs_of_windows_stay_small_where_few_are_left():
    """Each element is made of nine loads."""
    pool, twice = (lambda x: ts.avg_pool2d(x, 3, stride=1, padding=1)), (lambda x: x * 2)
    for batch, function, held in ((1, pool, 1024), (8, pool, 2048), (1, twice, 2048)):
        (tiles,) = choose_for_gpu(function, (batch, 1792, 64, 64))
        assert math.prod(tiles.values()) == held


@pytest.mark.parametrize(
    ("sizes", "dtype", "tile"),
    [
        ((4096, 4096), "f32", (32, 32)),
        ((4096, 4096), "bf16", (32, 64)),
        ((4096, 4096), "int8", (32, 128)),
        ((197, 4096), "bf16", (32, 32)),  # 256 in place of 224
        ((784, 4096), "bf16", (32, 64)),  # and not 16, which divides them
        ((256, 256), "bf16", (32, 32)),  # too few programs are left
    ],
)
def test_runs_that_a_transpose_stores_have_as_many_bytes_for_narrow_types(sizes, dtype, tile):
    turned = lambda x: ts.permute(ts.cast(x, dtype), (1, 0))  # noqa: E731
    assert tuple(t for _, _, t in choose(turned, sizes, target="ptx")) == tile


@pytest.mark.parametrize(("rows", "lanes"), [(64, 256), (512, 32), (1000, None)])
def test_columns_that_are_read_twice_are_held_on_a_gpu(rows, lanes):
    """As long as 32 of them have 16,384 elements at most."""
    norm = lambda x: x / ts.sqrt(ts.mean(x * x, axis=1, keepdims=True) + 1e-5)  # noqa: E731
    (_, _, images), (_, _, held), (_, _, columns) = choose(norm, (64, rows, 40_000), target="ptx")
    assert images == 1 and (held == rows) == (lanes is not None)
    assert lanes is None or columns == lanes


@pytest.mark.parametrize("rows", [700, 1030])
def test_columns_that_registers_do_not_hold_are_read_in_rounds(rows):
    x = np.random.default_rng(rows).standard_normal((2, rows, 40)).astype("f4")
    norm = ts.jit(lambda x: x / ts.sqrt(ts.mean(x * x, axis=1, keepdims=True) + 1e-5))
    (ours,) = run_level(lower(norm.trace(x).function, "ptx"), "tile", [x], "ptx")
    np.testing.assert_allclose(ours, x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("known", [("N", "M"), ("N", 70), (17, "M")])
def test_columns_of_unknown_length_are_read_in_rounds(known):
    @ts.jit(target="ptx", dynamic=True)
    def norm(x: ts.Tensor[known]):
        return (x - ts.mean(x, axis=0)) * ts.rsqrt(ts.var(x, axis=0) + 1.0)

    for rows in (17,) if known[0] == 17 else (3, 17, 40):
        x = np.random.default_rng(rows).standard_normal((rows, 70)).astype("f4")
        want = (x - x.mean(0)) / np.sqrt(x.var(0) + 1)
        np.testing.assert_allclose(norm(x).numpy(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("m", "k", "n", "rows"), [
    (82337, 77, 45, 601), (8192, 512, 128, 256), (4096, 64, 128, 128), (2048, 512, 1024, 256), (120, 64, 64, 120),
])  # fmt: skip
def test_many_blocks_of_a_product_have_more_rows(m, k, n, rows):
    """As many as a cache holds, where 32 programs are left."""
    assert choose(lambda x, w: x @ w, (m, k), (k, n))[0] == (m, "parallel", rows)


@pytest.mark.parametrize(
    ("columns", "tile"),
    [
        (33, 33),  # 64 would be 64 again
        (80, 80),  # 96, in place of 128, are too many for tiles that divide no row
        (96, 32),  # 96 of 96 elements, in place of 128
        (100, 100),
        (128, 128),
        (136, 32),  # 160 in place of 256
        (192, 64),  # the widest of those that gain enough
        (200, 200),  # 256 in either case, or 224
        (260, 64),
        (1056, 1024),  # more than a program has
    ],
)
def test_rows_are_padded_little(columns, tile):
    """On targets whose blocks are powers of two; others pad no rows."""
    scale = lambda x, w: x * w  # noqa: E731
    assert choose(scale, (4096, columns), (columns,), target="ptx")[-1] == (columns, "parallel", tile)
    assert choose(scale, (4096, columns), (columns,))[-1] == (columns, "parallel", columns)


def sum_taps(count, columns):
    """Sums over images of products with shifted columns, as of the taps of a depthwise convolution."""
    return lambda x, g: tuple(ts.sum(x[..., i : i + columns] * g, axis=(1, 2)) for i in range(count))


@pytest.mark.parametrize(
    ("count", "rows", "columns", "tile"),
    [(4, 56, 56, 56), (8, 40, 48, 48), (3, 56, 56, 3136), (4, 32, 64, 2048), (4, 28, 28, 784)],
    ids=["rows", "of fewer elements", "few reductions", "powers of two", "short rows"],
)
def test_many_reductions_read_rows(count, rows, columns, tile):
    x, g = (8, rows, columns + 8), (8, rows, columns)
    assert choose(sum_taps(count, columns), x, g, target="ptx")[-1] == (rows * columns, "reduce", tile)


def test_many_reductions_read_the_innermost_rows():
    sums = lambda x, g: tuple(ts.sum(x[:, :, 1:13, i : i + 40] * g, axis=(1, 2, 3)) for i in range(4))  # noqa: E731
    assert choose(sums, (8, 6, 14, 48), (8, 6, 12, 40), target="ptx")[-1] == (2880, "reduce", 40)
