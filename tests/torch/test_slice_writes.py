"""In-place ops of torch.compile on slices: the slice alone is written, where it lies; what is between stays."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tessera as ts  # noqa: E402


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    ts.torch.reset_report()


def compile_it(function, **options):
    return torch.compile(function, backend="tessera", dynamic=False, options={"fallback": False, **options})


def place(sizes, strides, dtype=torch.float32, offset=0, room=0):
    """A slice of memory of small whole numbers, and the memory: `room` elements follow the last of the slice."""
    last = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
    memory = (torch.arange(last + 1 + room) % 7 + 1).to(dtype)
    return memory.as_strided(sizes, strides, offset), memory


def list_copies(compiled, *tensors):
    with torch.profiler.profile() as profile:
        compiled(*tensors)
    names = ("aten::copy_", "aten::clone", "aten::contiguous")
    return [event.key for event in profile.key_averages() if event.key in names]


def check(function, *specs, copies=False, **more):
    """Compare the memory of the tensors after calls with that of eager PyTorch."""
    compiled = compile_it(function)
    for _ in range(2):  # other tensors of the same strides
        given, wanted = ([place(*spec, **more) for spec in specs] for _ in range(2))
        for _ in range(2):
            found = compiled(*(view for view, _ in given))
            expected = function(*(view for view, _ in wanted))
            for (_, memory), (_, right) in zip(given, wanted, strict=True):
                torch.testing.assert_close(memory, right, rtol=0, atol=0)
            if isinstance(expected, torch.Tensor):
                torch.testing.assert_close(found, expected, check_stride=True)
    assert bool(list_copies(compiled, *(view for view, _ in given))) == copies


def exchange(x, y):
    kept = x * 2
    x.copy_(y)
    y.copy_(kept)


def swap(x, y):
    kept = y.clone()
    y.copy_(x)
    x.copy_(kept)


def read_before(x, y):
    """The results read what was there before, in kernels of their own."""
    kept = x[:2, :3].t() * 2 + 3
    x.copy_(torch.where(x > 3, x, -x))
    total = x.sum()
    y.mul_(total)
    return kept, total


def write_twice(x):
    x.mul_(2)
    x[:, 1:3].add_(1)


ROWS, COLUMNS = ((9, 5), (8, 1)), ((3, 4, 5), (40, 8, 1))
CASES = {  # of the op shapes that PyTorch's training logs have, and others
    "mul_": (lambda x: x.mul_(32), ((8, 3, 12, 16, 4), (48960, 16320, 1360, 85, 1), torch.float16)),
    "copy_": (
        lambda x, y: x.copy_(y),
        ((12, 3, 16, 16), (4 * 16 * 33, 16 * 33, 33, 1), torch.float16),
        ((12, 3, 16, 16), (3 * 32 * 33, 32 * 33, 33, 1), torch.float16),
    ),
    "masked_fill_": (
        lambda x, y: x.masked_fill_(y > 3, 0),
        ((6, 474), (475, 1), torch.int64),
        ((6, 474), (474, 1), torch.int64),
    ),
    "fill_": (lambda x, y: x.fill_(y), ((2,), (128,), torch.int64), ((), (), torch.int64)),
    "zero_": (lambda x: x.zero_(), COLUMNS),
    "of another type": (lambda x, y: x.copy_(y), ROWS, (*ROWS, torch.int32)),
    "broadcast": (lambda x, y: x.add_(y), COLUMNS, ((5,), (1,))),
    "repeated": (lambda x, y: x.add_(y), ROWS, ((9, 5), (0, 1))),
    "turned": (lambda x: x.mul_(2), ((5, 9), (1, 8))),
    "turned, of rows": (lambda x, y: x.copy_(y), ((5, 9), (1, 8)), ((5, 9), (9, 1))),
    "every other element": (lambda x: x.add_(1), ((7, 4), (8, 2))),
    "reversed": (lambda x: x.add_(x.flip(0)), ROWS),
    "long and reversed": (lambda x: x.add_(x.flip(0)), ((70, 1511), (2000, 1))),
    "less its sums": (lambda x: x.sub_(x.sum(0)), ((7, 1511), (2000, 1))),
    "less sums of rows": (lambda x: x.sub_(x.sum(1, keepdim=True)), ((70, 31), (40, 1))),
    "both": (lambda x, y: (x.mul_(2).add_(y), y.add_(1))[0], ROWS, ((9, 5), (7, 1))),
    "exchanged": (exchange, ROWS, ((9, 5), (7, 1))),
    "swapped": (swap, ((9, 5), (1, 12)), ((9, 5), (7, 1))),
    "read before": (read_before, ((17, 33), (136, 4)), ((9,), (2,))),
    "a part of it": (lambda x: x[:, 1:].mul_(2), ROWS),
    "a row of it": (lambda x: x[3].mul_(2), ROWS),
    "twice": (write_twice, ROWS),
    "overlapping parts": (lambda x: x[:, :4].add_(x[:, 1:]), ROWS),
    "a part of all": (lambda x: x[1:3, 2:].mul_(2), ((4, 6), (6, 1))),
    "a part of a part": (lambda x: x[:, 1:4][2].mul_(3), ((8, 9), (9, 1))),
    "parts of all": (lambda x, y: x[:, 3:7].copy_(y), ((8, 9), (9, 1)), ((8, 4), (4, 1))),
}


# What reads, in a partial tile or by indices, more than it uses: the memory must go on behind the slice.
LOOSE = ("reversed", "long and reversed", "less its sums", "twice")


@pytest.mark.parametrize("room", [0, 4096])
@pytest.mark.parametrize("name", CASES)
def test_slices_are_written_where_they_lie(name, room):
    function, *specs = CASES[name]
    loose = not room and bool(list_loose(function, *specs))  # some kernel reads what is behind the slice
    assert loose == (not room and name in LOOSE)
    check(function, *specs, room=room, copies=loose)


def list_loose(function, *specs):
    """The tensors of which a compiled function may read what it does not use."""
    from tessera.torch import compile_backend

    found = []
    compile_first = compile_backend.compile_in_place

    def note(*args):
        program = compile_first(*args)
        found.extend(program.loose)
        return program

    compile_backend.compile_in_place = note
    try:
        compile_it(function)(*(place(*spec, room=4096)[0] for spec in specs))
    finally:
        compile_backend.compile_in_place = compile_first
    torch._dynamo.reset()
    return found


def test_what_another_thread_writes_between_the_slices_stays():
    """Old values that were written back would undo it."""
    memory, rounds, started = torch.zeros(64, 1024), 3000, threading.Event()
    slices, between = memory[:, :512], memory[:, 512:]
    compiled = compile_it(lambda x: x.add_(1))
    compiled(slices)

    def count():
        started.set()
        for _ in range(rounds):
            between.add_(1)

    thread = threading.Thread(target=count)
    thread.start()
    started.wait()
    calls = 1
    while thread.is_alive():
        compiled(slices)
        calls += 1
    assert calls > 10 and bool((between == rounds).all()) and bool((slices == calls).all())


# A slice whose last element is before a page that nobody may read.
AT_THE_END = """
import ctypes, mmap, sys
import torch
sys.path.insert(0, {folder!r})
from test_slice_writes import compile_it, list_copies, place

libc, page, held = ctypes.CDLL(None), mmap.PAGESIZE, []
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def move(view, memory):
    size = memory.numel() * memory.element_size()
    pages = -(-size // page) + 1
    area = mmap.mmap(-1, pages * page)
    held.append(area)
    first = ctypes.addressof(ctypes.c_char.from_buffer(area))
    assert not libc.mprotect(first + (pages - 1) * page, page, 0)
    moved = torch.frombuffer(area, dtype=memory.dtype, count=memory.numel(), offset=(pages - 1) * page - size)
    moved.copy_(memory)
    return moved.as_strided(view.size(), view.stride()), moved

function = lambda x: x.mul_(2).add_(1)
for spec in {specs!r}:
    torch._dynamo.reset()
    given, wanted = move(*place(*spec)), place(*spec)
    compiled = compile_it(function)
    compiled(given[0])
    assert given[0].data_ptr() % 16 == 0 and not list_copies(compiled, given[0]), spec
    function(function(wanted[0]))
    assert torch.equal(given[1], wanted[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect")
def test_nothing_behind_a_slice_is_touched():
    specs = [((9, 4), (8, 1)), ((6, 44), (48, 1)), ((5, 1512), (2000, 1)), ((3, 2, 20), (96, 24, 1)), ((4, 4), (1, 8))]
    text = AT_THE_END.format(folder=str(Path(__file__).parent), specs=specs)
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.parametrize("name", ["interleaved", "of one array"])
def test_slices_of_one_array(name):
    """AOTAutograd makes views that share elements anew from one array; others stay apart."""

    def interleaved(x, y):
        x.mul_(2)
        y.add_(x)

    function = interleaved if name == "interleaved" else lambda x, y: x.add_(y)
    first = 4 if name == "interleaved" else 1
    compiled = compile_it(function)
    for rows in (8, 700):
        torch._dynamo.reset()
        given, wanted = (torch.arange(rows * 8.0).reshape(rows, 8) for _ in range(2))
        for _ in range(2):
            compiled(given[:, :4], given[:, first : first + 4])
            function(wanted[:, :4], wanted[:, first : first + 4])
            torch.testing.assert_close(given, wanted, rtol=0, atol=0)


def test_addresses_that_kernels_do_not_take():
    """A slice that does not begin where vectors may be loaded is copied, and so is a negated one."""
    check(lambda x: x.mul_(2), (*ROWS, torch.float32, 1), copies=True)
    check(lambda x: x.mul_(2), (*ROWS, torch.float16, 3), copies=True)
    compiled, function = (f(lambda x: x.mul_(2).add_(1)) for f in (compile_it, lambda f: f))
    for negated in (False, True, False):
        given, wanted = ((view, memory) for view, memory in (place(*ROWS) for _ in range(2)))
        for run, (view, _) in ((compiled, given), (function, wanted)):
            run(torch._neg_view(view) if negated else view)
        torch.testing.assert_close(given[1], wanted[1], rtol=0, atol=0)


def test_other_addresses_after_a_call():
    """One function, with slices that kernels take and others in turns."""
    compiled = compile_it(lambda x: x.mul_(2))
    for offset, room in ((0, 64), (1, 64), (0, 0), (16, 0), (2, 0)):
        (given, memory), (wanted, right) = (place(*ROWS, offset=offset, room=room) for _ in range(2))
        compiled(given)
        wanted.mul_(2)
        torch.testing.assert_close(memory, right, rtol=0, atol=0)


def test_slices_without_elements_and_numbers_that_are_left():
    check(lambda x: x.mul_(2), ((0, 4), (8, 1)), copies=True)
    check(lambda x: x.mul_(2), ((4, 0), (8, 1)), copies=True)
    memory = torch.ones(4, 6, dtype=torch.complex64)
    torch.compile(lambda x: x.mul_(2), backend="tessera", dynamic=False)(memory[:, :3])
    torch.testing.assert_close(memory, torch.tensor([2.0, 2, 2, 1, 1, 1], dtype=torch.complex64).expand(4, 6))


@pytest.mark.parametrize(
    "options", [{"level": "tile"}, {"level": "graph"}, {"debug": True}, {"target": "ptx"}], ids=str
)
def test_other_engines(options):
    """They run on arrays, so PyTorch copies what they give."""
    compiled = compile_it(lambda x, y: x.mul_(y), **options)
    (given, memory), (wanted, right) = (place(*ROWS) for _ in range(2))
    factors = torch.arange(45.0).reshape(9, 5)
    compiled(given, factors)
    wanted.mul_(factors)
    torch.testing.assert_close(memory, right, rtol=0, atol=0)
