"""The shared-memory carve-out of a program: timed on its calls, chosen once, on a fake driver."""

from types import SimpleNamespace

import pytest

from tessera.codegen.ptx.runtime import carveout_trial, device_memory
from tessera.codegen.ptx.runtime.carveout_trial import CARVEOUTS, DEFAULT, ROUNDS, CarveoutTrial, TrialLaunch
from tessera.codegen.ptx.runtime.device_memory import NOT_READY
from tessera.codegen.ptx.runtime.gpu_program import GpuProgram

TIMED = len(CARVEOUTS) * (ROUNDS + 1)


@pytest.fixture
def driver(monkeypatch):
    """Events whose pairs take what `times` says of the carve-out that ran between them."""
    state = {"times": dict.fromkeys(CARVEOUTS, 2.0), "ran": [], "running": False, "status": 0}
    timed = {}

    def create(handle, flags):
        handle._obj.value = len(timed) + 1
        timed[handle._obj.value] = None
        return 0

    def record(event, stream):
        timed[event.value] = state["ran"][-1] if state["ran"] else None
        return 0

    def measure(found, first, last):
        found._obj.value = state["times"][timed[last.value]]
        return state["status"]

    calls = {
        "cuEventCreate": create, "cuEventRecord": record, "cuEventElapsedTime": measure,
        "cuEventDestroy_v2": lambda event: 0, "cuEventQuery": lambda event: NOT_READY if state["running"] else 0,
    }  # fmt: skip
    monkeypatch.setattr(device_memory, "find_driver_call", calls.__getitem__)
    monkeypatch.setattr(device_memory, "call_driver", lambda name, *arguments: calls[name](*arguments))
    return state


class StandInKernel:
    """A kernel that notes the carve-out it prefers."""

    carveout = DEFAULT

    def prefer_carveout(self, percent):
        self.carveout = percent


def bind(driver, trial, recorded):
    """A launch whose graphs note the carve-out they were recorded with."""
    kernels = [StandInKernel(), StandInKernel()]

    def record():
        (percent,) = {kernel.carveout for kernel in kernels}
        recorded.append(percent)
        return lambda: driver["ran"].append(percent)

    return TrialLaunch(trial, kernels, record, 1)


@pytest.mark.parametrize("fastest", CARVEOUTS)
def test_the_fastest_is_chosen_and_every_call_runs_once(driver, fastest):
    driver["times"][fastest] = 1.0
    trial, recorded = CarveoutTrial(), []
    launch = bind(driver, trial, recorded)
    for _ in range(TIMED + 3):
        launch()
    assert trial.chosen == fastest and driver["ran"][TIMED:] == [fastest] * 3 and len(driver["ran"]) == TIMED + 3
    assert {each: driver["ran"][:TIMED].count(each) for each in CARVEOUTS} == dict.fromkeys(CARVEOUTS, ROUNDS + 1)
    assert recorded == list(CARVEOUTS)


def test_other_arguments_take_part_and_record_the_chosen_one_alone(driver):
    driver["times"][100] = 1.0
    trial, recorded = CarveoutTrial(), []
    launches = [bind(driver, trial, []), bind(driver, trial, []), bind(driver, trial, recorded)]
    for number in range(TIMED + 1):
        launches[number % 2]()
    launches[2]()
    launches[1]()
    assert trial.chosen == 100 and recorded == [100] and driver["ran"][-2:] == [100, 100]


def test_the_drivers_choice_runs_while_timed_calls_do(driver):
    driver["times"][100], driver["running"] = 1.0, True
    trial = CarveoutTrial()
    launch = bind(driver, trial, [])
    for _ in range(TIMED + 4):
        launch()
    assert trial.chosen is None and driver["ran"][TIMED:] == [DEFAULT] * 4
    driver["running"] = False
    launch()
    assert trial.chosen == 100 and driver["ran"][-1] == 100


def test_the_drivers_choice_stays_where_events_tell_nothing_or_all_take_as_long(driver):
    for status in (0, 1):
        driver["status"], trial = status, CarveoutTrial()  # of cuEventElapsedTime
        launch = bind(driver, trial, [])
        for _ in range(TIMED + 1):
            launch()
        assert trial.chosen == DEFAULT


def test_programs_of_few_kernels_or_of_kernels_alike_are_not_tried():
    assert carveout_trial.is_worth_a_trial([0, 1024] * 4)
    assert not carveout_trial.is_worth_a_trial([0, 1024]) and not carveout_trial.is_worth_a_trial([1024] * 100)


def test_a_failed_recording_leaves_the_drivers_choice(driver):
    kernel = StandInKernel()
    with pytest.raises(ZeroDivisionError):
        TrialLaunch(CarveoutTrial(), [kernel], lambda: 1 / 0, 1)()
    assert kernel.carveout == DEFAULT


@pytest.mark.parametrize(("shared", "tried"), [([0, 1024] * 4, True), ([0] * 8, False), ([0, 1024] * 3, False)])
def test_programs_on_a_gpu_are_tried(driver, shared, tried):
    """Calls with arguments that come again, of programs that a CUDA graph can hold."""
    made, kernels = GpuProgram.__new__(GpuProgram), [StandInKernel() for _ in shared]
    made.launches = [None, *(SimpleNamespace(kernel=k, shared=n) for k, n in zip(kernels, shared, strict=True))]
    made._steps, made.calls, made._carveout = [{"run": [0, len(shared) + 1]}], (), CarveoutTrial()
    recorded = []
    made.bind = lambda given, stream: lambda: recorded.append((tuple(given), stream))
    run = made._bind_repeated([64], 1)
    assert isinstance(run, TrialLaunch) == tried
    run()
    made._steps = [{"while": 0, "test": [], "body": []}]
    assert not isinstance(made._bind_repeated([64], 1), TrialLaunch) and recorded == [((64,), 1)]
