"""Host plans: slices of buffers, their overlap, and the parameters that a kernel touches."""

import numpy as np
import pytest
from tilekernels import Kernel

import tessera as ts
from tessera import tile
from tessera.codegen.contract import emit_artifact, get_backend
from tessera.codegen.host_plan import (
    HostBufferSlice,
    HostPlanBuilder,
    find_aliased_parameters,
    find_touched_parameters,
)
from tessera.codegen.plan_execution import check_plan, find_overlapped_launches
from tessera.core.errors import ArtifactError, ResourceError
from tessera.core.types import f32
from tessera.ir.builder import Builder
from tessera.ir.core import Attrs, Function, Module, Value
from tessera.ops.dialects import host
from tessera.runtime.driver import lower
from tessera.runtime.program import prepare


def test_a_slice_overlaps_all_that_its_loop_reaches():
    part, behind = HostBufferSlice(-1, 0, 64).slice(0, 16), HostBufferSlice(-1, 32, 16)
    assert part.overlaps(behind) and behind.overlaps(part)
    assert not part.overlaps(HostBufferSlice(-1, 64, 16))


def test_a_slice_moves_with_every_loop_around_it():
    part = HostBufferSlice(-1, 128, 64).slice(0, 16).slice(1, 4)
    assert part.describe() == {"offset": 128, "bytes": 4, "moves": [[0, 16], [1, 4]]}


@ts.kernel
def copied(x, out):
    here = tile.alloc_shared((32, 32), ts.f32)
    tile.cp_async(here, x[0:32, 0:32], edge="clip")
    tile.cp_commit_group()
    tile.cp_wait_group(0)
    tile.store(out[0:32, 0:32], tile.load(here[0:32, 0:32]))


def test_an_asynchronous_copy_reads_its_source():
    given = {"x": np.zeros((32, 32), "f4"), "out": np.zeros((32, 32), "f4")}
    function = prepare(copied, given, "llvm", (1,)).levels["tile"].functions[1]
    assert find_touched_parameters(function, "read") == {0} and find_touched_parameters(function, "write") == {1}


def make_plan(*steps, argument=None, scratch=0):
    """A plan with one parameter, 64 bytes of workspace and one launch."""
    x = {"name": "x", "shape": [4], "dtype": "f32", "role": "input"}
    launch = {"kernel": "k", "grid": [1, 1, 1], "args": [argument or {"param": 0}]}
    plan = {"params": [x], "workspace": 64, "launches": [launch], "scratch": {"k": scratch}}
    return {**plan, "written": [], "read": [0], "steps": list(steps)}


def make_loop(count, offset, move, step=1, first=0):
    """A plan with a loop around the launch; each trip works on 16 bytes of the workspace."""
    loop = {"loop": 0, "first": first, "step": step, "count": count, "body": [{"run": [0, 1]}]}
    return make_plan(loop, argument={"offset": offset, "bytes": 16, "moves": [[0, move]]})


@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        (make_plan({"run": [0, 1]}), make_plan({"run": [0, 2]})),
        (make_plan({"run": [1, 1]}), make_plan({"run": [1, 0]})),
        (make_plan({"run": [0, 1]}), make_plan({"call": 0})),
        (make_loop(4, 0, 16), make_loop(5, 0, 16)),
        (make_loop(1, 48, 16), make_loop(2, 48, 16)),
        (make_loop(0, 48, 16), make_loop(0, 64, 16)),
        (make_loop(4, 0, 1, step=16), make_loop(4, 0, 1, step=17)),
        (make_loop(4, 0, 16, step=-1, first=3), make_loop(4, 0, 16, step=-1, first=4)),
        (make_loop(4, 48, -16), make_loop(4, 32, -16)),
    ],
)
def test_a_plan_whose_slices_leave_the_memory_is_refused(plan, wrong):
    check_plan(plan, 1000, 1)
    with pytest.raises(ArtifactError):
        check_plan(wrong, 1000, 1)


CALLS = {
    "calls": [
        {"op": "ts.all_reduce", "operands": 1, "attrs": {}, "args": [{"param": 0, "shape": [4], "dtype": "f32"}] * 2}
    ]
}


@pytest.mark.parametrize(
    "wrong",
    [
        [{"wait": 0}], [{"start": [0, 2]}, {"wait": 0}], [{"start": [0, 1]}, {"wait": 1}], [{"start": [0]}],
        [{"start": [0, 1]}, {"wait": 0}, {"wait": 0}], [{"agree": [[[0, 1], "ab"]]}], [{"agree": [[[[0, 1]], 1]]}],
    ],
)  # fmt: skip
def test_a_wait_for_what_was_not_started_is_refused(wrong):
    check_plan({**make_plan({"agree": [[[[0, 1]], "ab"]]}, {"start": [0, 1]}, {"wait": 0}), **CALLS}, 1000, 1)
    with pytest.raises(ArtifactError):
        check_plan({**make_plan(*wrong), **CALLS}, 1000, 1)


def test_launches_beside_collectives():
    steps = [
        {"run": [0, 1]}, {"start": [0, 2]}, {"run": [1, 3]}, {"wait": 1}, {"loop": 0, "body": [{"run": [3, 4]}]},
        {"wait": 0}, {"run": [4, 5]},
        {"loop": 1, "body": [{"start": [2, 3]}, {"run": [5, 6]}, {"wait": 2}, {"run": [6, 7]}]},
    ]  # fmt: skip
    assert find_overlapped_launches(steps) == {1, 2, 3, 5}


def test_the_scratch_memory_of_a_kernel_counts():
    check_plan(make_plan(scratch=1000), 1000, 1)
    with pytest.raises(ResourceError, match="asks for 1,001 bytes of memory"):
        check_plan(make_plan(scratch=1001), 1000, 1)


def test_arrays_without_elements_are_parameters_too():
    module = lower(
        ts.jit(lambda x, y: ts.concatenate([x, y])).trace(np.ones(0, "f4"), np.ones(3, "f4")).function, "llvm"
    )
    plan = emit_artifact(get_backend("llvm"), module["tile"], {}).manifest["plan"]
    launches = [{**each, "args": [*each["args"], {"param": 0}]} for each in plan["launches"]]
    assert plan["params"][0]["shape"] == [0]
    check_plan({**plan, "launches": launches}, 1 << 10, 10)
    with pytest.raises(ArtifactError, match="the plan"):
        check_plan({**plan, "launches": [{**launches[0], "args": [{"param": 3}]}]}, 1 << 10, 10)


def test_pairs_of_parameters_that_share_memory_are_the_same_or_overlap():
    """In both launches the first two arguments are one; the last overlaps the first in the second launch alone."""
    x = np.zeros((4, 8), np.float32)
    k = Kernel(x, x, x)
    k.store(k.params[0], k.add(k.load(k.params[1]), k.load(k.params[2])))
    entry, params = Builder(), [Value(p.type, p.hint) for p in k.params[:2]]
    for third in (params[1], params[0]):
        entry.add(host.launch, [params[0], params[0], third], {"kernel": "k", "grid": (1,)})
    kernel = k.module().functions[1]
    main = Function("main", entry.block(params, []), Attrs({"outputs": 0}))
    found = find_aliased_parameters(Module("tile", (main, kernel)))
    assert found == {"k": {(0, 1): True, (0, 2): True}}


def test_buffers_of_the_workspace_are_aligned_for_vectors():
    def function(x):
        y = ts.softmax(x @ x, axis=1)
        return ts.softmax(y @ x, axis=0) @ y

    module = lower(ts.jit(function).trace(np.ones((7, 7), "f4")).function, "ptx")["tile"]
    launches = emit_artifact(get_backend("ptx"), module, {}).manifest["plan"]["launches"]
    offsets = {a["offset"] for each in launches for a in each["args"] if "offset" in a}
    assert len(offsets) > 1 and not any(n % 64 for n in offsets)


def test_buffers_without_a_place_are_aligned_for_vectors_too():
    """Before memory is planned they follow each other, each at a multiple of 64 bytes."""
    entry = Builder()
    buffers = [entry.add(host.alloc, [], {"shape": (n,), "dtype": f32, "offset": -1}).out for n in (3, 17, 5, 1)]
    main = Function("main", entry.block((), ()), Attrs({"outputs": 0}))
    plan = HostPlanBuilder(main)
    assert [plan.slices[v].offset for v in buffers] == [0, 64, 192, 256] and plan.workspace == 260
