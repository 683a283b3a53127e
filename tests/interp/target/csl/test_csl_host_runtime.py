"""Host runtime: tensors of copies, the order of calls, `SdkLayout`, the debug tools, pictures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tessera as ts
from tessera.core.errors import ArgumentError, DeviceUnavailable, FileError, ShapeError, TesseraError
from tessera.interp.target.csl import host_tools_folder
from tessera.interp.target.csl.host import cs_python, cslc, port_maps, sdk_layout
from tessera.interp.target.csl.host import runtime as host_runtime
from tessera.interp.target.csl.host.runtime import (
    HostTensor,
    MemcpyDataType,
    MemcpyOrder,
    SdkRuntime,
    debug_util,
    read_environment,
)
from tessera.interp.target.csl.host.visualisation import draw_run, make_chrome_trace

AXPY = Path(__file__).parent / "programs" / "axpy" / "layout.csl"
WORDS, HALVES = MemcpyDataType.MEMCPY_32BIT, MemcpyDataType.MEMCPY_16BIT
HOW = {"data_type": WORDS, "order": MemcpyOrder.ROW_MAJOR}


def compile_axpy(folder, *more):
    words = [str(AXPY), "--fabric-dims=10,3", "--fabric-offsets=4,1", "--params=width:3,n:8", "--memcpy", *more]
    return cslc.main([*words, "-o", str(folder)])


@pytest.fixture
def runtime(tmp_path):
    assert compile_axpy(tmp_path) == 0
    return SdkRuntime(tmp_path)


@pytest.mark.parametrize("order", MemcpyOrder)
@pytest.mark.parametrize("kind, dtype", [(WORDS, np.float32), (HALVES, np.uint32)])
def test_a_tensor_is_split_and_reassembled(order, kind, dtype):
    cube = np.arange(2 * 3 * 4).reshape(2, 3, 4).astype(dtype)
    flat = cube.reshape(-1, order="F" if order is MemcpyOrder.COL_MAJOR else "C")
    places = [(x, y) for y in range(2) for x in range(3)]
    rows = HostTensor(flat, places, (2, 3, 4), kind, order).rows()
    assert all((rows[x, y].view(dtype if kind is WORDS else np.uint16) == cube[y, x]).all() for x, y in places)
    back = HostTensor(np.zeros_like(flat), places, (2, 3, 4), kind, order)
    for place, row in back.empty(False).items():
        row[:] = rows[place]
    back.fill()
    assert (back.array == flat).all()


def test_a_small_host_array_is_an_error():
    with pytest.raises(ShapeError, match="is too small for the copy"):
        HostTensor(np.zeros(3, np.float32), [(0, 0)], (1, 1, 4), WORDS, MemcpyOrder.ROW_MAJOR)
    with pytest.raises(ArgumentError, match="elements of 32 bits"):
        HostTensor(np.zeros(4, np.float16), [(0, 0)], (1, 1, 4), HALVES, MemcpyOrder.ROW_MAJOR)


def test_the_rest_of_a_longer_array_is_unchanged():
    array = np.arange(6, dtype=np.float32)
    tensor = HostTensor(array, [(0, 0)], (1, 1, 4), WORDS, MemcpyOrder.ROW_MAJOR)
    assert tensor.rows()[0, 0].view(np.float32).tolist() == [0, 1, 2, 3]
    tensor.empty(False)
    tensor.fill()
    assert array.tolist() == [0, 0, 0, 0, 4, 5]


def test_a_longer_array_with_strides_is_filled():
    array = np.zeros((6, 2), np.float32)[:, 0]
    tensor = HostTensor(array, [(0, 0)], (1, 1, 4), WORDS, MemcpyOrder.ROW_MAJOR)
    tensor.empty(False)[0, 0][:] = np.ones(4, np.float32).view(np.uint32)
    tensor.fill()
    assert array.tolist() == [1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize("count, kind", [(0, ShapeError), (-1, ShapeError), (8.0, ArgumentError)])
def test_a_copy_of_no_number_of_elements(count, kind):
    with pytest.raises(kind, match="elements"):
        HostTensor(np.zeros(8, np.float32), [(0, 0)], (1, 1, count), WORDS, MemcpyOrder.ROW_MAJOR)


@pytest.mark.parametrize("array", [[0.0] * 24, np.broadcast_to(np.float32(0), (24,))], ids=["list", "read-only"])
def test_a_copy_back_into_what_cannot_be_filled(array, runtime):
    runtime.load()
    runtime.run()
    with pytest.raises(ArgumentError, match="cannot fill"):
        runtime.memcpy_d2h(array, runtime.get_id("x"), 0, 0, 3, 1, 8, **HOW)


def test_calls_in_the_wrong_order(runtime):
    x = np.zeros(8, np.float32)
    with pytest.raises(ArgumentError, match=r"run\(\) is called out of order"):
        runtime.run()
    runtime.load()
    with pytest.raises(ArgumentError, match="a runtime that is loaded"):
        runtime.memcpy_h2d(0, x, 0, 0, 1, 1, 8, **HOW)
    runtime.run()
    with pytest.raises(ArgumentError, match="region of interest"):
        runtime.memcpy_h2d(0, np.zeros(16, np.float32), 2, 0, 2, 1, 8, **HOW)
    with pytest.raises(ArgumentError, match="exports no symbol 'z'"):
        runtime.get_id("z")
    with pytest.raises(ArgumentError, match="9 is not the id of a symbol"):
        runtime.memcpy_d2h(x, 9, 0, 0, 1, 1, 8, **HOW)


def test_rows_and_columns_are_broadcast(runtime):
    runtime.load()
    runtime.run()
    runtime.memcpy_h2d_rowbcast(runtime.get_id("x"), np.arange(8, dtype=np.float32), 0, 0, 3, 1, 8, **HOW)
    runtime.memcpy_h2d_colbcast(runtime.get_id("y"), np.ones(24, np.float32), 0, 0, 3, 1, 8, **HOW)
    task = runtime.call("axpy", [np.float32(3)], nonblock=True)
    assert not runtime.is_task_done(task)
    runtime.task_wait(task)
    assert runtime.is_task_done(task)
    assert (runtime.read_symbol(2, 0, "y", np.float32) == 3 * np.arange(8) + 1).all()
    assert runtime.coord_logical_to_physical(2, 0) == (6, 1)


def test_missing_files_and_symbols_are_errors(tmp_path, capsys):
    with pytest.raises(FileError, match="has no compiled program"):
        SdkRuntime(tmp_path)
    with pytest.raises(FileError, match="ran in this process"):
        debug_util(tmp_path)
    assert compile_axpy(tmp_path) == 0
    with pytest.raises(DeviceUnavailable, match="no machine at 1.2.3.4:9000"):
        SdkRuntime(tmp_path, cmaddr="1.2.3.4:9000")
    assert compile_axpy(tmp_path, "--fabric-dims=9,3") == 1
    assert "the fabric is too small" in capsys.readouterr().err
    assert compile_axpy(tmp_path, "--params=n:x") == 1
    assert "--params cannot be parsed" in capsys.readouterr().err


def test_the_compiled_program_does_not_change_with_its_sources(tmp_path):
    source = tmp_path / "layout.csl"
    source.write_text(AXPY.read_text())
    (tmp_path / "pe.csl").write_text((AXPY.parent / "pe.csl").read_text())
    assert cslc.main([str(source), "--params=width:2,n:4", "-o", str(tmp_path / "out")]) == 0
    source.write_text("this is not CSL")
    assert SdkRuntime(tmp_path / "out").get_id("y") == 1
    assert json.loads((tmp_path / "out" / "out.json").read_text())["params"] == {"width": "2", "n": "4"}


@pytest.mark.parametrize("option, name", [("--output-json", "out.json"), ("--output-json=a/b.json", "a/b.json")])
def test_the_values_of_parameters_are_written_where_a_script_reads_them(option, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["--params=width:2,n:4", "-o", "out", option, str(AXPY)]
    (tmp_path / "a").mkdir()
    assert cslc.main(words) == 0
    assert json.loads((tmp_path / name).read_text()) == {"params": {"width": "2", "n": "4"}, "colors": {}}
    assert cslc.main([*words, "--output-json=none/b.json"]) == 1
    assert "none/b.json" in capsys.readouterr().err


SENDER = """
param size: u16;
param tx: color;
var data = @zeros([size]u32);
const out = @get_dsd(fabout_dsd, .{ .extent = size, .fabric_color = tx, .output_queue = @get_output_queue(2) });
const in_dsd = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{size} -> data[i] });
task main() void { @mov32(out, in_dsd, .{ .async = true }); }
comptime {
  @bind_local_task(main, @get_local_task_id(9));
  @activate(@get_local_task_id(9));
  if (@is_arch("wse3")) { @initialize_queue(@get_output_queue(2), .{ .color = tx }); }
}
"""


RECEIVER = """
param size: u16;
param rx: color;
export var data = @zeros([size]u32);
const in = @get_dsd(fabin_dsd, .{ .extent = size, .fabric_color = rx, .input_queue = @get_input_queue(2) });
const data_dsd = @get_dsd(mem1d_dsd, .{ .tensor_access = |i|{size} -> data[i] });
task main() void { @mov32(data_dsd, in, .{ .async = true }); }
comptime {
  @bind_local_task(main, @get_local_task_id(9));
  @activate(@get_local_task_id(9));
  @initialize_queue(@get_input_queue(2), .{ .color = rx });
}
"""


@pytest.mark.parametrize("target", sdk_layout.SdkTarget)
def test_ports_are_connected_around_another_region(tmp_path, target):
    """Regions a, b, c side by side: a sends to c on a path around b, and b sends to the host."""
    for name, text in (("sender", SENDER), ("receiver", RECEIVER)):
        (tmp_path / f"{name}.csl").write_text(text)
    layout = sdk_layout.SdkLayout(sdk_layout.get_platform("", None, target))
    ports = {}
    for x, (name, code) in enumerate((("a", "sender"), ("b", "sender"), ("c", "receiver"))):
        region = layout.create_code_region(str(tmp_path / f"{code}.csl"), name, 1, 2)
        region.place(x, 1)
        region.set_param_all("size", 6)
        color = region.color("tx" if code == "sender" else "rx", None if name == "b" else 7)
        region.set_param_all(color)
        position = sdk_layout.RoutingPosition()
        if code == "sender":
            region.set_symbol_all("data", np.arange(12, dtype=np.uint32) * (x + 1), 6, 2)
            position = position.set_input([sdk_layout.Route.RAMP])
            ports[name] = region.create_output_port(color, sdk_layout.Edge.TOP, [position], 6)
        else:
            position = position.set_output([sdk_layout.Route.RAMP])
            ports[name] = region.create_input_port(color, sdk_layout.Edge.TOP, [position], 6)
    with pytest.raises(ArgumentError, match="these ports cannot be connected"):
        layout.connect(ports["a"], ports["b"])
    layout.connect(ports["a"], ports["c"])
    stream = layout.create_output_stream(ports["b"])
    runtime = SdkRuntime(layout.compile(str(tmp_path / "out")), layout.platform, memcpy_required=False)
    runtime.load()
    runtime.run()
    got = np.zeros(6, np.uint32)
    runtime.receive(stream, got, 6)
    runtime.stop()
    assert (got == 2 * np.arange(6)).all()
    assert (runtime.read_symbol(2, 1, "data", "uint32") == np.arange(6)).all()


def test_a_trace_and_a_picture(runtime, tmp_path):
    runtime.load()
    runtime.run()
    runtime.launch("axpy", 1.0)
    trace = make_chrome_trace(runtime._simulation)
    tasks = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in tasks} == {"axpy"}
    assert [pe["memory"] > 64 for pe in trace["otherData"]["pes"]] == [True] * 3
    with pytest.raises(ArgumentError, match=".png or .svg"):
        draw_run(runtime._simulation, tmp_path / "grid.pdf")
    pytest.importorskip("matplotlib")
    draw_run(runtime._simulation, tmp_path / "grid.svg")
    assert "<svg" in (tmp_path / "grid.svg").read_text()


def test_wrong_host_arguments_are_errors(runtime, monkeypatch):
    layout, region = sdk_layout.SdkLayout(sdk_layout.get_platform(None)), "pe.csl"
    layout.create_code_region(region, "a", 1, 1)
    monkeypatch.setenv("TESSERA_CSL_SEED", "one")
    calls = {
        "is not flat": lambda: host_runtime.input_array_to_u32(np.zeros((2, 2), np.int16), None, 1),
        "must have 16 or 32 bits": lambda: host_runtime.input_array_to_u32(np.zeros(2, np.int64), None, 1),
        "have 16 or 32 bits": lambda: host_runtime.memcpy_view(np.zeros(2, np.uint32), np.dtype(np.int64)),
        "--fabric-dims cannot be parsed": lambda: cslc.collect_settings(
            cslc.make_parser().parse_args([str(AXPY), "--fabric-dims=1"])
        ),
        "overlaps its memcpy frame": lambda: cslc.compile_settings(
            cslc.collect_settings(
                cslc.make_parser().parse_args(
                    [str(AXPY), "--fabric-dims=20,9", "--fabric-offsets=1,1", "--memcpy", "--params=width:3,n:8"]
                )
            )
        ),
        "the layout determines a port's own direction": lambda: layout.regions[0].create_input_port(
            sdk_layout.Color("c"),
            sdk_layout.Edge.LEFT,
            [sdk_layout.RoutingPosition().set_input([sdk_layout.Route.WEST])],
            1,
        ),
        "two code regions have the name 'a'": lambda: layout.create_code_region(region, "a", 1, 1),
        "has no option colour": lambda: SdkRuntime(".", colour=True),
        "TESSERA_CSL_SEED is not an integer": lambda: read_environment("SEED"),
    }
    for message, call in calls.items():
        with pytest.raises(ArgumentError, match=message):
            call()


def test_the_language_of_an_environment(monkeypatch):
    monkeypatch.setenv("TESSERA_CSL_SDK", "2.10")
    assert cslc.make_parser().parse_args([str(AXPY)]).sdk == "2.10"
    monkeypatch.delenv("TESSERA_CSL_SDK")
    assert cslc.make_parser().parse_args([str(AXPY)]).sdk == "1.4"


def test_cslc_removes_only_what_it_wrote(tmp_path):
    """A second compilation replaces the copies of the first; a folder `src` of the user stays as it is."""
    assert compile_axpy(tmp_path) == compile_axpy(tmp_path) == 0
    mine = tmp_path / "src" / "mine.txt"
    mine.write_text("mine")
    assert compile_axpy(tmp_path) == 0
    assert mine.read_text() == "mine"
    copies = {p for p in (tmp_path / "src").rglob("*.csl")}
    assert copies and all(p.read_text() == Path("/", p.relative_to(tmp_path / "src")).read_text() for p in copies)


def test_cslc_writes_over_no_file_of_the_user(tmp_path, capsys):
    mine = tmp_path / "src" / AXPY.relative_to("/")
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert compile_axpy(tmp_path) == 1
    assert "was not written by cslc" in capsys.readouterr().err and mine.read_text() == "mine"
    (linked := tmp_path / "linked").mkdir()
    (linked / "src").symlink_to(tmp_path / "src")
    assert compile_axpy(linked) == 1
    assert "src is a link" in capsys.readouterr().err


def test_a_port_map_places_a_tensor_and_reads_it_back():
    """The map of an early program: row i of a 4 x 6 matrix is on PE (i % 2, i // 2), its columns in pairs."""
    text = "{ A[i=0:3][j=0:5] -> [PE[1 + i % 2, i // 2] -> index[j // 2, j % 2]] }"
    a = np.arange(24, dtype=np.float32).reshape(4, 6)
    *region, data = port_maps.convert_input_tensor(text, a)
    assert region == [1, 0, 2, 2, 6]
    cube = data.reshape(2, 2, 6)
    assert all((cube[i // 2, i % 2] == a[i]).all() for i in range(4))
    assert (port_maps.format_output_tensor(text, np.float32, data) == a).all()
    assert port_maps.prepare_output_tensor(text, np.float32)[5].size == 24


WRONG_MAPS = ("", "[PE[i, 0]] }", "[PE[i.x, 0] -> index[i]] }", "[PE[k, 0] -> index[i]] }", "[PE[i] -> index[i]] }")


WRONG_MAPS += tuple(f"[PE[{pe}] -> index[{index}]] }}" for pe, index in (
    ("i, 0", "i - 1"), ("i, 0", "i // 0"), ("i, 0", "1 % (i - i)"), ("i ** 9, 0", "0"), ("abs(i), 0", "0"),
    ("i, 0", "0.5"),
))  # fmt: skip


@pytest.mark.parametrize("text", [
    *(f"{{ A[i=0:1] -> {text}" for text in WRONG_MAPS),
    "{ A[i=1:0] -> [PE[i, 0] -> index[0]] }", "{ A[i=0:1][j] -> [PE[i, 0] -> index[0]] }",
])  # fmt: skip
def test_a_wrong_port_map_is_an_error(text):
    with pytest.raises(ArgumentError):
        port_maps.parse_port_map(text)


def test_a_tensor_of_another_size_than_its_port_map_is_an_error():
    with pytest.raises(ShapeError, match="does not have the elements"):
        port_maps.convert_input_tensor("{ A[i=0:3] -> [PE[i, 0] -> index[0]] }", np.zeros(3))


def test_a_program_uses_tessera_that_the_tools_do_not_load():
    text = "import sys; print('tessera.ops' in sys.modules); import tessera as ts; print(ts.__version__, ts.abs(-2.0))"
    command = [str(host_tools_folder() / "cs_python"), "-c", text]
    env = {**os.environ, "TESSERA_PYTHON": sys.executable}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["False", ts.__version__] and "Tensor(2., f32)" in done.stdout


@pytest.mark.parametrize("words, message", [(["none.py"], "no such script: none.py"), (["-c"], "names nothing to run")])
def test_a_script_that_is_not_there_is_a_message(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert cs_python.main(words) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda run: run.read_symbol(0, 0, "nothing"), "no variable 'nothing'"),
        (lambda run: run.read_symbol(9, 9, "y"), r"no PE \(9, 9\)"),
        (lambda run: run.read_symbol(0, 0, "y", "nope"), "cannot be read as elements of 'nope'"),
        (lambda run: run.send(3, np.zeros(4, np.uint32)), "no such stream"),
        (lambda run: run.receive(3, np.zeros(4, np.uint32), 4), "no such stream"),
        (lambda run: host_runtime.memcpy_view(np.zeros(2), np.dtype(np.uint16)), "an array of 32-bit words"),
    ],
)
def test_wrong_names_and_streams_are_typed_errors(runtime, wrong, message):
    runtime.load()
    runtime.run()
    with pytest.raises(ArgumentError, match=message):
        wrong(runtime)


WRONG_VALUES = (5.5, None, "none", b"x", [], {}, object(), (1, 2), np.zeros(3), float("nan"), -1)


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=lambda value: repr(value)[:12])
def test_wrong_values_of_every_argument_are_typed_errors(runtime, wrong):
    runner = runtime
    runner.load()
    runner.run()
    number, array = runner.get_id("x"), np.zeros(16, np.float32)
    sizes = {"px": 0, "py": 0, "w": 1, "h": 1, "elem_per_pe": 2}
    for name in ("memcpy_h2d", "memcpy_h2d_rowbcast", "memcpy_h2d_colbcast", "memcpy_d2h"):
        copy = getattr(runner, name)
        for argument in (*sizes, *HOW):
            named = {**sizes, **HOW, argument: wrong}
            with pytest.raises(TesseraError):
                copy(*((array, number) if name == "memcpy_d2h" else (number, array)), **named)
        with pytest.raises(TesseraError):
            copy(*((array, wrong) if name == "memcpy_d2h" else (wrong, array)), **sizes, **HOW, streaming=True)
    for call in (runner.get_id, runner.task_wait, runner.is_task_done, runner.launch, runner.call):
        with pytest.raises(ArgumentError):
            call(wrong)
    with pytest.raises(ArgumentError):
        runner.read_symbol(0, 0, wrong)


def test_an_error_of_the_host_names_what_it_expects_and_was_given(runtime):
    with pytest.raises(ArgumentError, match="the folder that cslc -o wrote") as error:
        SdkRuntime(5)
    assert "5 (int)" in str(error.value)
    with pytest.raises(ArgumentError, match="HostCommand") as error:
        runtime.is_task_done("x")
    assert "'x' (str)" in str(error.value)
