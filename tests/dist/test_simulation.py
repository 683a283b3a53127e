"""What the simulator finds in programs whose ranks do wrong together: both ranks, and the line of each."""

import numpy as np
import pytest

import tessera as ts
from tessera.errors import ArgumentError, AsyncCopyError, CollectiveError, DeadlockError

mesh = ts.Mesh((4,), "x")


def find(function, error, *texts):
    """The finding of a program of four ranks; every text is in it."""
    with pytest.raises(error) as found:
        ts.spmd(function, mesh=mesh, out_specs="ranks")()
    text = str(found.value)
    assert all(t in text for t in texts), text
    return text


def line_of(function, text):
    """The place of a line of a function, as errors show it."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def test_other_order():
    def program():
        if ts.get_rank() == 2:
            ts.all_gather(ts.ones((3,)))
        return ts.all_reduce(ts.ones((3,)))

    places = line_of(program, "all_gather"), line_of(program, "all_reduce")
    find(program, CollectiveError, "rank 2 calls another collective than rank 0", "all_gather(3xf32", *places)


def test_other_shape_and_type():
    def shapes():
        return ts.all_reduce(ts.ones((3 + ts.get_rank() // 3,)))

    def types():
        return ts.all_reduce(ts.ones((3,), dtype=ts.f32 if ts.get_rank() else ts.f64))

    find(shapes, CollectiveError, "rank 3", "rank 0", "4xf32", "3xf32", line_of(shapes, "all_reduce"))
    find(types, CollectiveError, "rank 1", "rank 0", "3xf64", "3xf32")


def test_other_reduction():
    def program():
        return ts.all_reduce(ts.ones((3,)), "max" if ts.get_rank() == 1 else "sum")

    find(program, CollectiveError, "kind=max", "kind=sum", "rank 1", "rank 0")


def test_a_rank_that_never_arrives():
    def program():
        x = ts.all_reduce(ts.ones((2,)), "max")
        return x if ts.get_rank() == 3 else ts.all_gather(x)

    places = line_of(program, '"max"'), line_of(program, "all_gather")
    find(program, DeadlockError, "rank 0 waits for rank 3, which has ended", "was its last call", *places)


def test_ranks_that_wait_for_each_other():
    def program():
        rank = ts.get_rank()
        got = ts.recv((2,), src=rank ^ 1)
        ts.send(got, dst=rank ^ 1)
        return got

    find(program, DeadlockError, "rank 0 waits for rank 1, which waits", "receive", line_of(program, "recv"))


def test_crossed_groups():
    cross = ts.Mesh((2, 2), ("a", "b"))

    def program():
        return ts.all_reduce(ts.ones((2,)), axis="a" if ts.get_rank() else "b")

    with pytest.raises(DeadlockError, match="waits for rank"):
        ts.spmd(program, mesh=cross, out_specs="ranks")()


def test_unmatched_messages():
    def unread():
        if ts.get_rank() == 1:
            ts.send(ts.ones((2,)), dst=2, tag=7)

    def unsent():
        return ts.recv((2,), src=1) if ts.get_rank() == 2 else None

    def other_type():
        if ts.get_rank() == 1:
            ts.send(ts.ones((2,)), dst=2)
        return ts.recv((3,), src=1) if ts.get_rank() == 2 else None

    find(unread, CollectiveError, "rank 2 never receives what rank 1 sends", "tag=7", line_of(unread, "ts.send"))
    find(unsent, DeadlockError, "rank 2 waits for rank 1, which has ended", line_of(unsent, "recv"))
    find(other_type, CollectiveError, "rank 2 receives another type", "3xf32", "2xf32", line_of(other_type, "ts.send"))


def test_messages_in_order():
    def program():
        rank = ts.get_rank()
        for i in range(3):
            ts.send(ts.full((2,), 10.0 * rank + i), dst=(rank + 1) % 4, tag=i % 2)
        return [ts.recv((2,), src=(rank - 1) % 4, tag=t)[0].item() for t in (1, 0, 0)]

    found = ts.spmd(program, mesh=mesh, out_specs="ranks")()
    assert found == [[10 * ((r - 1) % 4) + i for i in (1, 0, 2)] for r in range(4)]


def test_one_spec_cuts_arguments_by_keyword():
    total = ts.spmd(lambda x: ts.all_reduce(x), mesh=mesh, in_specs=ts.dist.P("x"))
    np.testing.assert_array_equal(total(x=ts.arange(4.0)), [6.0])


def test_results_in_other_containers():
    with pytest.raises(CollectiveError, match="other containers on rank 0 and rank 1"):
        ts.spmd(lambda: (ts.ones(()),) * (1 + ts.get_rank()), mesh=mesh)()
    with pytest.raises(CollectiveError, match="other containers") as found:
        ts.spmd(lambda: {"b" if ts.get_rank() == 3 else "a": ts.ones(())}, mesh=mesh)()
    assert "rank 3: b" in str(found.value)


def test_parts_of_other_sizes_name_the_result():
    with pytest.raises(CollectiveError, match="the result of rows") as found:

        def rows():
            return ts.ones((1 + ts.get_rank(),))

        ts.spmd(rows, mesh=mesh, out_specs=ts.dist.P("x"))()
    assert "threading.py" not in str(found.value)


def test_replicas_that_drift():
    with pytest.raises(CollectiveError, match="differs between rank 0 and rank 2") as found:
        ts.spmd(lambda: ts.full((3,), 1.0 + (ts.get_rank() >= 2)), mesh=mesh)()
    assert "rank 0: 1.0 at [0]" in str(found.value) and "rank 2: 2.0 at [0]" in str(found.value)
    assert __file__ in str(found.value)


def test_numbers_that_differ():
    with pytest.raises(CollectiveError, match="differs between rank 0 and rank 1"):
        ts.spmd(lambda: ts.get_rank(), mesh=mesh)()


def test_an_error_outside_of_the_program_has_the_line_of_the_call():
    with pytest.raises(ArgumentError, match="no axis 'y'") as found:
        ts.spmd(lambda x: x, mesh=mesh, out_specs=ts.dist.P("y"))(ts.ones((4,)))
    assert found.value.location.file == __file__


def test_partial_sums_used_as_whole():
    x, w = ts.ones((3, 8)), ts.arange(24.0).reshape((8, 3))
    specs = (ts.dist.P(None, "x"), ts.dist.P("x"))
    with pytest.raises(CollectiveError, match="a partial sum needs"):
        ts.spmd(lambda x, w: x @ w, mesh=mesh, in_specs=specs)(x, w)
    whole = ts.spmd(lambda x, w: x @ w, mesh=mesh, in_specs=specs, out_specs=ts.ShardSpec.sums("x"))(x, w)
    np.testing.assert_array_equal(whole, np.asarray(x) @ np.asarray(w))


def test_read_of_a_tensor_that_is_being_gathered():
    def program():
        out = ts.zeros((4, 2))
        handle = ts.all_gather_into_async(out, ts.ones((2,)))
        return handle.wait() if ts.get_rank() != 3 else out + 1.0

    find(program, AsyncCopyError, "rank 3 reads a tensor", "handle.wait()", line_of(program, "out + 1.0"))


def test_async_results_and_order():
    def program():
        rank = float(ts.get_rank())
        a, b = ts.all_reduce_async(ts.full((2,), rank)), ts.all_gather_async(ts.full((1,), rank))
        assert a.wait() is a.wait()
        return ts.concatenate([b.wait(), a.wait()])

    assert ts.spmd(program, mesh=mesh)().tolist() == [0, 1, 2, 3, 6, 6]


def test_an_error_of_one_rank_ends_all():
    ended = []

    def program():
        if ts.get_rank() == 3:
            raise ZeroDivisionError("three")
        try:
            return ts.all_reduce(ts.ones((2,)))
        finally:
            ended.append(ts.get_rank())

    with pytest.raises(ZeroDivisionError, match="three"):
        ts.spmd(program, mesh=mesh)()
    assert sorted(ended) == [0, 1, 2]


def test_many_ranks():
    many = ts.Mesh((16, 16), ("a", "b"))
    total = ts.spmd(lambda: ts.all_reduce(ts.full((1,), float(ts.get_rank())), axis="a"), mesh=many, out_specs="ranks")
    assert [t.item() for t in total()][:2] == [sum(range(0, 256, 16)), sum(range(1, 256, 16))]


def test_meshes():
    grid = ts.Mesh(devices=np.arange(8).reshape(2, 4), axis_names=["data", "model"])
    assert grid.size == 8 and grid.coordinate(6) == (1, 2) and grid.rank((1, 2)) == 6
    assert grid.groups("model") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert grid.groups(("model", "data"))[0] == (0, 4, 1, 5, 2, 6, 3, 7)
    named = ts.dist.mesh(devices=[f"cuda:{i}" for i in range(16)], axes=("dp", "tp", "pp"), shape=(4, 2, 2))
    assert named.shape == {"dp": 4, "tp": 2, "pp": 2}
    assert ts.HierarchicalMesh({"node": 4, "gpu": 4, "replica": 1}).axis("gpu").size == 4
    for bad in (
        lambda: ts.Mesh((2, 2), ("a",)), lambda: ts.Mesh((2, 2), ("a", "a")), lambda: ts.Mesh([0, 0], "a"),
        lambda: ts.Mesh(0), lambda: ts.Mesh("gpu"), lambda: ts.Mesh(2.5), lambda: ts.Mesh(2, "a", engine="smoke"),
        lambda: ts.HierarchicalMesh([2, 2]), lambda: ts.Mesh(4).coordinate(4), lambda: ts.Mesh(4).rank((4,)),
        lambda: ts.spmd(abs, mesh="x"), lambda: ts.dist.P(3), lambda: ts.Mesh((-2,), "a"),
        lambda: ts.dist.mesh(devices=["a", "b"], axes=("x",), shape=(3,)), lambda: ts.Mesh([[0, 1], [2]], ("a", "b")),
    ):  # fmt: skip
        with pytest.raises(ArgumentError):
            bad()


def test_questions_of_a_rank():
    grid = ts.Mesh((2, 3), ("a", "b"))

    def program():
        with grid.axis("b"):
            inner = ts.all_gather(ts.full((1,), float(ts.get_rank()))).tolist()
        north = ts.dist.mesh_shift(ts.full((1,), float(ts.get_rank())), axis=0, shift=1).item()
        edge = ts.dist.mesh_shift(ts.full((1,), 1.0 + ts.get_rank()), axis="b", shift=1, wrap=False).item()
        return ts.get_rank(), ts.get_world_size(), ts.mesh_coordinate(), ts.get_rank(grid.axis("b")), inner, north, edge

    found = ts.spmd(program, mesh=grid, out_specs="ranks")()
    assert found[4] == (4, 6, (1, 1), 1, [3, 4, 5], 1, 4) and found[3][-1] == 0


def test_a_compiled_function_knows_its_rank():
    scale = ts.jit(lambda x: x * float(ts.get_rank()))
    found = ts.spmd(lambda: scale(ts.ones((2,))), mesh=mesh, out_specs="ranks")
    assert [r.tolist()[0] for r in found()] == [0, 1, 2, 3] == [r.tolist()[0] for r in found()]
