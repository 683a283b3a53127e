"""CUDA driver calls: failed launches, CUDA graphs and cooperative launches, on a fake driver."""

import ctypes
import types

import pytest

from tessera.codegen.contract import get_backend
from tessera.codegen.ptx import generator
from tessera.codegen.ptx.runtime import driver_api, gpu_program
from tessera.codegen.ptx.runtime.driver_api import GPU, CudaGraph, LoadedModule
from tessera.codegen.ptx.runtime.emulated_program import EMULATOR_NAME
from tessera.codegen.ptx.runtime.gpu_program import BoundLaunch, DriverKernel, _is_recordable
from tessera.core.errors import ArtifactError, DeviceUnavailable, ExecutionError, ResourceError


class Failure(Exception):
    """Any error of the driver's."""


class LaunchError(Failure):
    """A kernel that failed."""


def driver(stands=True, threads=1024, room=232_448):
    """A driver after a failed launch, whose context still stands or not; and what it says of a kernel."""

    def synchronize():
        if not stands:
            raise Failure("lost")

    names = types.SimpleNamespace(MAX_THREADS_PER_BLOCK=1, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN=2)
    device = types.SimpleNamespace(name=lambda: "a GPU", get_attribute=lambda which: room)
    made = GPU.__new__(GPU)
    made.device, made.here = device, types.SimpleNamespace(active=True)
    made.driver = types.SimpleNamespace(
        Error=Failure, LaunchError=LaunchError, MemoryError=type("MemoryError", (Failure,), {}),
        Context=types.SimpleNamespace(synchronize=synchronize), function_attribute=names, device_attribute=names,
        Stream=lambda: types.SimpleNamespace(handle=7),
    )  # fmt: skip
    function = types.SimpleNamespace(get_attribute=lambda which: threads)
    return made, function


@pytest.mark.parametrize(("stands", "said"), [(True, "can still use the GPU"), (False, "start a new one")])
def test_failed_launch_reports_whether_the_context_survives(stands, said):
    made, _ = driver(stands)
    with pytest.raises(ExecutionError, match=said), made.active():
        raise LaunchError("no")


def test_kernel_exceeds_resources():
    made, function = driver(threads=256, room=1000)
    made.check_resources("k", function, 256, 1000)
    with pytest.raises(ResourceError, match="registers"):
        made.check_resources("k", function, 512, 1000)
    with pytest.raises(ResourceError, match="1,001 bytes of shared memory"):
        made.check_resources("k", function, 256, 1001)


def test_missing_driver(monkeypatch):
    monkeypatch.setattr(driver_api, "DRIVER_LIBRARY", "libnobody.so.1")
    driver_api.load_driver_library.cache_clear()
    with pytest.raises(DeviceUnavailable, match="driver is not here"):
        driver_api.call_driver("cuInit", 0)
    driver_api.load_driver_library.cache_clear()


class Library:
    """Calls noted by name; each gives the status that it is said to."""

    def __init__(self, **statuses):
        self.statuses, self.made = statuses, []

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def made(*arguments):
            self.made.append(name)
            return self.statuses.get(name, 0)

        return made


@pytest.fixture
def library(monkeypatch):
    def install(**statuses):
        found = Library(**statuses)
        monkeypatch.setattr(driver_api, "load_driver_library", lambda: found)
        return found

    return install


def test_cuda_graph_records_and_replays(library):
    found, (made, _) = library(), driver()
    made._held, queued = set(), []
    recorded = CudaGraph(made, lambda stream: queued.append(stream.handle))
    recorded.bind(5)()
    assert queued == [7] and recorded in made._held
    order = ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphDestroy"]
    assert found.made == [*order, "cuGraphLaunch"]


@pytest.mark.parametrize(("status", "typed"), [(2, ResourceError), (900, ExecutionError)])
def test_driver_error_types(library, status, typed):
    found, (made, _) = library(cuGraphInstantiateWithFlags=status, cuGetErrorName=1), driver()
    with pytest.raises(typed, match="cuGraphInstantiateWithFlags"):
        CudaGraph(made, lambda stream: None)
    assert found.made.count("cuGraphDestroy") == 1


def test_failed_capture_is_ended(library):
    found, (made, _) = library(), driver()
    with pytest.raises(ZeroDivisionError):
        CudaGraph(made, lambda stream: 1 / 0)
    assert found.made == ["cuStreamBeginCapture_v2", "cuStreamEndCapture"]


def test_data_dependent_steps_are_not_recordable():
    loop = {"loop": 0, "first": 0, "step": 1, "count": 3, "body": [{"run": [0, 1]}]}
    asking = {"while": 0, "test": [], "body": []}
    assert _is_recordable([]) and _is_recordable([{"run": [0, 2]}, loop])
    assert not _is_recordable([asking]) and not _is_recordable([{**loop, "body": [asking]}])


def test_launch_arguments_and_attributes(library, monkeypatch):
    found, seen = library(), {}
    maps = bytes(range(128))

    def launch(config, function, arguments, extra):
        config = config._obj
        seen.update(
            grid=tuple(config.grid), block=tuple(config.block), shared=config.shared, stream=config.stream,
            cooperative=config.count and config.attributes[0].id,
            map=ctypes.string_at(arguments[0], 128), aligned=arguments[0] % 64,
            values=[kind.from_address(at).value for kind, at in zip(KINDS, arguments[1:], strict=True)],
        )  # fmt: skip
        return seen.get("status", 0)

    monkeypatch.setattr(found, "cuLaunchKernelEx", launch, raising=False)
    module = LoadedModule(".version 7.8")
    kernel = DriverKernel(module, "k", "Pfi", maps=1, cooperative=True)
    run = BoundLaunch(kernel, (4, 1, 1), 32, 50_000, [maps, 64, 0.5, -3], 7)
    run()
    assert seen == {
        "grid": (4, 1, 1), "block": (32, 1, 1), "shared": 50_000, "stream": 7, "cooperative": 2, "map": maps,
        "aligned": 0, "values": [64, 0.5, -3],
    }  # fmt: skip
    seen["status"] = 700
    with pytest.raises(ExecutionError, match=r"a kernel failed \(cuLaunchKernelEx[\s\S]*start a new one"):
        run()
    with pytest.raises(ValueError):
        BoundLaunch(kernel, (4, 1, 1), 32, 0, [maps, 64, 0.5], 0)


KINDS = (ctypes.c_uint64, ctypes.c_float, ctypes.c_int32)


def test_kernel_of_a_module(library):
    found, (made, _) = library(), driver()
    made.processors = 132
    module = LoadedModule(".version 7.8")
    kernel = DriverKernel(module, "k", "P", cooperative=True)
    kernel.allow_shared(50_000)
    assert found.made == ["cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncSetAttribute"]
    with pytest.raises(ResourceError, match=r"k has 133 programs[\s\S]*at most 0 on a GPU"):  # the stand-in fits none
        kernel.check_residency(made, 133, 1024, 50_000)
    module.handle.value = 64  # a handle, as the driver would have given
    module.free()
    module.free()
    assert found.made.count("cuModuleUnload") == 1


def test_refused_text_shows_its_line(library):
    library(cuModuleLoadDataEx=218, cuGetErrorName=1)
    with pytest.raises(ArtifactError, match="cannot assemble"):
        LoadedModule(".version 99.9")


def test_a_long_program_is_two_graphs():
    most = gpu_program.MIN_SPLIT_LAUNCHES
    loop = {"loop": 3, "body": [{"run": [0, 2]}]}
    assert gpu_program._split_steps([{"run": [0, most - 1]}]) == [[{"run": [0, most - 1]}]]
    assert gpu_program._split_steps([loop, {"run": [0, most]}]) == [[loop, {"run": [0, most]}]]
    head, rest = gpu_program._split_steps([{"run": [2, most + 2]}, loop])
    cut = 2 + gpu_program.HEAD_LAUNCHES
    assert (head, rest) == ([{"run": [2, cut]}], [{"run": [cut, most + 2]}, loop])


def test_a_launch_without_attributes(library, monkeypatch):
    found, counts = library(), []
    monkeypatch.setattr(found, "cuLaunchKernelEx", lambda c, *_: counts.append(c._obj.count) or 0, raising=False)
    module = LoadedModule(".version 7.8")
    for how in ({}, {"cooperative": True}, {"dependent": True}):
        BoundLaunch(DriverKernel(module, "k", "P", **how), (1, 1, 1), 32, 0, [64], 0)()
    assert counts == [0, 1, 1]


@pytest.mark.parametrize(("count", "has"), [(0, False), (1, True)])
def test_a_generator_knows_whether_there_is_a_gpu(count, has, monkeypatch):
    monkeypatch.setattr(generator, "count_gpus", lambda: count)
    assert get_backend("ptx").has_device is has


@pytest.mark.parametrize(("count", "name"), [(0, EMULATOR_NAME), (1, "a GPU")])
def test_what_runs_artifacts_has_a_name(count, name, monkeypatch):
    monkeypatch.setattr(gpu_program, "count_gpus", lambda: count)
    monkeypatch.setattr(gpu_program, "get_gpu", lambda: types.SimpleNamespace(name="a GPU"))
    assert get_backend("ptx").where() == name


@pytest.mark.parametrize("fails", [False, True])
def test_at_exit_queued_failures_are_examined_while_the_context_exists(monkeypatch, fails):
    made, order = GPU.__new__(GPU), []
    context = types.SimpleNamespace(push=lambda: None)
    made.here, made.context, made._modules = types.SimpleNamespace(active=False), context, {}
    made._held, made._retired = [types.SimpleNamespace(free=lambda: order.append("free"))], []
    made._pool = types.SimpleNamespace(stop_holding=lambda: order.append("pool"))
    made.driver = types.SimpleNamespace(Context=types.SimpleNamespace(pop=lambda: order.append("pop")))

    def examine():
        order.append("examine")
        if fails:
            raise ExecutionError("index out of bounds")

    monkeypatch.setattr(driver_api, "wait_and_examine", examine)
    if fails:
        with pytest.raises(ExecutionError, match="out of bounds"):
            made._leave()
    else:
        made._leave()
    assert order == ["examine", "free", "pool", "pop"]
