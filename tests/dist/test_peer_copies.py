"""Peer copies: channels of permutations on memory that stands for that of GPUs whose processes map each other's.

`python -m benchmarks.dist --engine nccl -n 2 copies` runs such permutations on GPUs.
"""

import json
import types

import numpy as np
import pytest
from fake_nccl import FakeNccl, run_on_fake
from fake_peers import PeerMemory, fill
from hypothesis import given, settings
from hypothesis import strategies as st

import tessera as ts
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.codegen.plan_execution import execute_plan, find_steps, view_as_array, view_memory
from tessera.codegen.ptx.runtime import queued_plan
from tessera.codegen.ptx.runtime.emulated_program import _EmulatedPlanEngine, _load_module
from tessera.dist import layers, peer_copies
from tessera.dist.ranks import CURRENT_RANK, exchange_in_place, has_copy_engines, open_channels, start_in_place
from tessera.errors import ArgumentError, CollectiveError, DeadlockError, ShapeError
from tessera.runtime.program import prepare

@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(peer_copies, "LEAST_BYTES", 1)


def run_ranks(mesh, program, refuses=lambda rank: "", libraries=None):
    """As `run_on_fake`, with memory that ranks map; `refuses` says which call of the driver fails at a rank."""
    wrap = None if libraries is None else lambda library: libraries.append(library) or library
    return run_on_fake(mesh, program, memory=lambda rank: PeerMemory(rank, refuses(rank)), wrap=wrap)


def ring(count, shift=1):
    return tuple((i, (i + shift) % count) for i in range(count))


def permute(pairs, groups, shape=(3, 5), rounds=3, record=True, beside=True):
    """What a rank gets in each round of one program, and the log of its memory; later rounds replay the first."""
    world, rank = CURRENT_RANK.get().world, ts.get_rank()
    memory = world.memory
    x, out = (memory.empty(shape, np.dtype("f4"), 0) for _ in range(2))
    attrs = {"pairs": pairs, "groups": groups, "site": "here"}
    (channel,) = open_channels([(attrs, out.address, x.nbytes)])
    if channel is not None:
        attrs["channel"] = channel

    def queue():
        if beside:
            memory.wait(0, start_in_place([("collective_permute", x, out, attrs)], 0))
        else:
            assert exchange_in_place("collective_permute", x, out, attrs)

    found, memory.log = [], []
    if record and channel is not None:
        memory.queue = []
        queue()
        graph, memory.queue = memory.queue, None
    for number in range(rounds):
        fill(x, np.full(shape, 10 * rank + number, "f4"))
        fill(out, np.full(shape, np.nan, "f4"))
        memory.replay(graph) if record and channel is not None else queue()
        found.append(out.numpy())
    return found, memory.log, channel is not None


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_ring(count, record, beside):
    """Each round hands over new values, and leaves the flags as it found them."""
    libraries, groups = [], (tuple(range(count)),)
    results = run_ranks(
        ts.Mesh(count), lambda: permute(ring(count), groups, record=record, beside=beside), libraries=libraries
    )
    for rank, (found, log, copied) in enumerate(results):
        assert copied
        for number, array in enumerate(found):
            np.testing.assert_array_equal(array, np.full((3, 5), 10 * ((rank - 1) % count) + number))
        # A rank grants its memory before it waits, and tells of its data after the copy.
        order = ["grant", "wait", "reset", "copy", "grant", "wait", "reset"]
        assert [name for name, _ in log] == 3 * order
    assert not any(library.calls for library in libraries), "NCCL sent something"


def test_ranks_at_different_speeds():
    """No word is lost, and nothing is written before it may be, whichever rank is ahead."""
    results = run_on_fake(
        ts.Mesh(3), lambda: permute(ring(3), ((0, 1, 2),), rounds=40),
        memory=lambda rank: PeerMemory(rank, pauses=(0.0, 1e-4, 4e-4)[rank]),
    )  # fmt: skip
    for rank, (found, _, copied) in enumerate(results):
        assert copied and [array[0, 0] for array in found] == [10 * ((rank - 1) % 3) + n for n in range(40)]


def test_ranks_that_only_send_or_receive_and_groups():
    """Zeros where nothing arrives; ranks of other groups have channels of their own."""
    pairs, groups = ((0, 1), (1, 2), (3, 5)), ((0, 1, 2), (3, 4, 5))
    for rank, (found, _, copied) in enumerate(run_ranks(ts.Mesh(6), lambda: permute(pairs, groups))):
        source = {1: 0, 2: 1, 5: 3}.get(rank)
        for number, array in enumerate(found):
            assert copied and (array == (0 if source is None else 10 * source + number)).all(), rank


@pytest.mark.parametrize("call", ["cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"])
def test_all_ranks_use_nccl_where_one_refuses(call):
    def program():
        found, log, copied = permute(ring(3), ((0, 1, 2),))
        return found, log, copied, CURRENT_RANK.get().world.copies.reasons

    for rank, (found, log, copied, reasons) in enumerate(
        run_ranks(ts.Mesh(3), program, lambda rank: call if rank == 1 else "")
    ):
        assert not copied and not log
        assert call in reasons[0, 1, 2] and "rank 1" in reasons[0, 1, 2]
        assert [array[0, 0] for array in found] == [10 * ((rank - 1) % 3) + number for number in range(3)]


def test_a_permutation_without_a_channel(monkeypatch):
    """Results whose address changes at one rank, few bytes, ranks that send to themselves, and a switch of the user."""

    def program():
        address, attrs = 1 << 20, {"pairs": ring(2), "groups": ((0, 1),)}
        own = {"pairs": ((0, 0), (1, 1)), "groups": ((0, 1),)}
        moved = None if ts.get_rank() else address
        found = open_channels([(attrs, moved, 64), (own, address, 64), (attrs, address, 0), (attrs, address, 63)])
        return found, has_copy_engines(ts.Mesh(2).axis("ranks"))

    monkeypatch.setattr(peer_copies, "LEAST_BYTES", 64)
    monkeypatch.setattr(PeerMemory, "share", lambda self, address: (b"%d" % self.rank, address))
    monkeypatch.setattr(PeerMemory, "map_shared", lambda self, handle: 0)
    monkeypatch.setattr(PeerMemory, "unmap_shared", lambda self, addresses: None)
    assert run_ranks(ts.Mesh(2, "ranks"), program) == [([None] * 4, True)] * 2
    monkeypatch.setenv("TESSERA_PEER_COPIES", "0")
    assert run_ranks(ts.Mesh(2, "ranks"), program) == [([None] * 4, False)] * 2


def test_without_memory_that_is_shared():
    """The emulated GPU's memory is none: NCCL makes the permutation."""

    def program():
        found, _, copied = permute(ring(2), ((0, 1),), rounds=1)
        return found[0][0, 0], copied

    def plain(rank):
        memory = PeerMemory(rank)
        memory.share = super(PeerMemory, memory).share
        return memory

    assert run_on_fake(ts.Mesh(2), program, memory=plain) == [(10, False), (0, False)]


def test_programs_that_permute_otherwise_are_an_error():
    def program():
        pairs = ring(2) if ts.get_rank() else ((0, 1),)
        permute(pairs, ((0, 1),))

    with pytest.raises(CollectiveError, match="other permutations") as caught:
        run_ranks(ts.Mesh(2), program)
    assert "[(0, 1)]" in caught.value.expected + caught.value.received


def test_a_rank_that_does_not_come():
    def program():
        if ts.get_rank() == 0:
            CURRENT_RANK.get().world.rendezvous.seconds = 0.05
            open_channels([({"pairs": ring(2), "groups": ((0, 1),)}, 256, 64)])

    with pytest.raises(DeadlockError, match="rank 0 agrees on copies with rank 1") as caught:
        run_ranks(ts.Mesh(2), program)
    assert "TESSERA_PEER_COPIES=0" in caught.value.suggestion


def test_mappings_are_given_up_at_the_end():
    """Before any rank leaves its communicators, and frees its memory; a second program maps nothing again."""
    memories = []

    class Leaving(FakeNccl):
        def __init__(self, library):
            super().__init__(library.hub)

        def comm_destroy(self, comm):
            super().comm_destroy(comm)
            assert not any(memory.mapped for memory in memories)

    def program():
        memory = CURRENT_RANK.get().world.memory
        memories.append(memory)
        permute(ring(2), ((0, 1),), rounds=1)
        before, kept = len(memory.mapped), list(memory.held)[1]  # x and out are the first allocations
        assert open_channels([({"pairs": ring(2), "groups": ((0, 1),)}, kept, 4)])[0] is not None
        return before, len(memory.mapped)

    for before, after in run_on_fake(ts.Mesh(2), program, memory=PeerMemory, wrap=Leaving):
        assert before == 2 and after == 2  # the page of flags, which is the first allocation, and the result
    assert len(memories) == 2 and not any(memory.mapped for memory in memories)


# Products: what `row_parallel` does with them.


def make_operands(ranks, rows, dtype, seed=0):
    """Whole numbers: their sums in f32 are exact in any order, and are rounded in narrower types."""
    rng = np.random.default_rng(seed)
    return [
        [ts.Tensor(rng.integers(-60, 60, s).astype("f4")).to(getattr(ts, dtype)) for s in ((rows * ranks, 5), (5, 4))]
        for _ in range(ranks)
    ]


def reduce_and_scatter(operands):
    """The sum of all products, in f32 and rounded once, in the order of the ranks: each rank's rows."""
    terms = [ts.matmul(x, w).to(ts.f32) for x, w in operands]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return np.split(total.to(operands[0][0].dtype).numpy(), len(operands))


def multiply(operands, parts, target=None):
    def program(x, w):
        return ts.dist.row_parallel(x, w, scatter=True, parts=parts)

    return lambda: (ts.jit(program, target=target) if target else program)(*operands[ts.get_rank()]).numpy()


@settings(max_examples=12, deadline=None)
@given(
    ranks=st.integers(1, 4), rows=st.integers(1, 5), dtype=st.sampled_from(["f32", "bf16", "f16"]),
    target=st.sampled_from([None, "llvm"]), seed=st.integers(0, 9),
)  # fmt: skip
def test_products_that_are_sent_are_those_that_are_scattered(ranks, rows, dtype, target, seed):
    """The same bits on the simulator and on NCCL, whose own sums round after each addition."""
    operands = make_operands(ranks, rows, dtype, seed)
    wanted = reduce_and_scatter(operands)
    mesh = ts.Mesh(ranks, engine="simulated")
    for found in (
        ts.spmd(multiply(operands, "ranks", target), mesh=mesh, out_specs="ranks")(),
        run_on_fake(ts.Mesh(ranks), multiply(operands, "ranks", target)),
    ):
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a.astype("f4"), b.astype("f4"))


def test_gradients_of_products_that_are_sent():
    operands = make_operands(3, 4, "f32")

    def program(parts):
        def loss(x, w):
            y = ts.dist.row_parallel(x, w, scatter=True, parts=parts)
            return ts.all_reduce((y * y).sum())

        return lambda: [g.numpy() for g in ts.grad(loss, argnums=(0, 1))(*operands[ts.get_rank()])]

    sent, scattered = (ts.spmd(program(parts), mesh=ts.Mesh(3), out_specs="ranks")() for parts in ("ranks", 1))
    for a, b in zip(sent, scattered, strict=True):
        for each, other in zip(a, b, strict=True):
            np.testing.assert_allclose(each, other, rtol=1e-5)


def test_parts_that_do_not_fit():
    for parts, error, text in ((3, ShapeError, "no 3 equal parts"), ("rank", ArgumentError, "'rank'")):
        with pytest.raises(error, match="parts") as caught:
            ts.spmd(multiply(make_operands(2, 4, "f32"), parts), mesh=ts.Mesh(2))()
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "ranks", "copies", "wanted"),
    [
        ((8192, 8192, 4096), 2, True, "ranks"),
        ((8192, 14336, 4096), 2, True, "ranks"),
        ((8192, 8192, 4096), 2, False, 1),
        ((16384, 28672, 8192), 2, False, 4),
        ((256, 128, 128), 8, True, 1),
        ((8192, 8192, 4096), 1, True, 1),
    ],
)
def test_the_choice_of_a_form(sizes, ranks, copies, wanted, monkeypatch):
    m, k, n = sizes
    monkeypatch.setattr(layers, "has_copy_engines", lambda where: copies)
    x, w = (types.SimpleNamespace(shape=s, dtype=ts.bf16, is_traced=True) for s in ((m, k // ranks), (k // ranks, n)))
    assert layers._choose_parts(x, w, types.SimpleNamespace(size=ranks)) == wanted


# Compiled programs: the plan of a product, whose kernels the PTX emulator runs, on memory that ranks map.


class QueuedInEmulator(queued_plan.QueuedPlan):
    """A queued plan whose launches run at once."""

    def launch(self, first, last):
        plan, given = self.program.plan, zip(self.program.plan["params"], self.given, strict=True)
        arrays = [view_as_array(view_memory(address, p), p) for p, address in given]
        room = view_memory(self.workspace, {"shape": [plan["workspace"]], "dtype": "uint8"})
        _EmulatedPlanEngine(plan, arrays, room, self.program.module).launch(first, last)


class Program:
    """A compiled program as the GPU's runtime holds it, for calls with one workspace."""

    def __init__(self, function, arrays):
        artifact = emit_artifact(get_backend("ptx"), prepare(ts.jit(function), arrays, "ptx").levels["tile"], {})
        self.plan, self.module = json.loads(json.dumps(artifact.manifest["plan"])), _load_module(artifact)
        self.memory, self.calls = CURRENT_RANK.get().world.memory, self.plan["calls"]
        self.workspace = self.memory.empty((self.plan["workspace"],), np.dtype(np.uint8), 0)
        self.channels = queued_plan.open_plan_channels(self.calls, self.workspace.address)
        self.steps = [step for step in find_steps(self.plan) if "agree" not in step]

    def find_channels(self, workspace):
        assert workspace == self.workspace.address
        return self.channels

    def run(self, arrays):
        result = self.plan["params"][-1]
        held = [self.memory.copy_in(a.numpy(), 0) for a in arrays]
        held.append(self.memory.empty(tuple(result["shape"]), ts.bf16.numpy, 0))
        execute_plan(self.steps, QueuedInEmulator(self, [h.address for h in held], 0, self.workspace.address))
        return held[-1].numpy()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_compiled_product(ranks, monkeypatch):
    """Blocks are sent while the next is computed, by copy engines alone, in each of several calls."""
    given = [make_operands(ranks, 16, "bf16", seed) for seed in range(3)]
    libraries = []

    def program():
        memory, rank = CURRENT_RANK.get().world.memory, ts.get_rank()
        multiply = lambda x, w: ts.dist.row_parallel(x, w, scatter=True, parts="ranks")  # noqa: E731
        compiled = Program(multiply, given[0][rank])
        return [compiled.run(each[rank]) for each in given], compiled.steps, len(compiled.channels), memory.log

    memories = {}
    monkeypatch.setattr(queued_plan, "get_device_memory", lambda: memories[ts.get_rank()])
    found = run_on_fake(
        ts.Mesh(ranks), program, memory=lambda rank: memories.setdefault(rank, PeerMemory(rank)),
        wrap=lambda library: libraries.append(library) or library,
    )  # fmt: skip
    for rank, (results, steps, channels, log) in enumerate(found):
        for result, operands in zip(results, given, strict=True):
            np.testing.assert_array_equal(result, reduce_and_scatter(operands)[rank])
        kinds = [kind for step in steps for kind in step]
        first = kinds.index("start")
        assert kinds.index("run", first) < kinds.index("wait") and kinds[-1] == "run", "nothing is computed meanwhile"
        assert channels == ranks - 1 and [name for name, _ in log].count("copy") == 3 * channels
    assert not any(library.calls for library in libraries)


def test_what_a_plan_says_of_its_permutations(monkeypatch):
    """Results that are parameters, or move with a loop, have no address that stays."""
    asked = []
    monkeypatch.setattr(queued_plan, "open_channels", lambda permutes: asked.extend(permutes) or ["channel", None, None])
    out = {"shape": [4, 2], "dtype": "bf16"}
    places = ({"offset": 256}, {"param": 1}, {"offset": 0, "moves": [[0, 16]]})
    calls = [{"op": "ts.all_reduce", "args": [out, out], "attrs": {}}]
    calls += [{"op": "ts.collective_permute", "args": [out, {**out, **place}], "attrs": {}} for place in places]
    assert queued_plan.open_plan_channels(calls, 1000) == {1: "channel"}
    assert asked == [({}, 1256, 16), ({}, None, 16), ({}, None, 16)]
    assert queued_plan.open_plan_channels(calls[:1], 1000) == {}
