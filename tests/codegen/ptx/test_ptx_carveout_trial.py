"""The shared-memory carve-out of a program: timed on its calls, chosen once, on a fake driver."""

import pytest

from tessera.codegen.ptx.runtime import carveout_trial
from tessera.codegen.ptx.runtime.carveout_trial import CARVEOUTS, DEFAULT, ROUNDS, CarveoutTrial, TrialLaunch
from tessera.codegen.ptx.runtime.device_memory import NOT_READY

TIMED = len(CARVEOUTS) * (ROUNDS + 1)


@pytest.fixture
def driver(monkeypatch):
    """Events whose pairs take what `times` says of the carve-out that ran between them."""
    state = {"times": dict.fromkeys(CARVEOUTS, 2.0), "ran": [], "running": False, "status": 0}
    timed = {}

    def create(handle, flags):
        handle._obj.value = len(timed) + 1
        timed[handle._obj.value] = None
        return state["status"]

    def record(event, stream):
        timed[event.value] = state["ran"][-1] if state["ran"] else None
        return 0

    def measure(found, first, last):
        found._obj.value = state["times"][timed[last.value]]
        return 0

    calls = {
        "cuEventCreate": create, "cuEventRecord": record, "cuEventElapsedTime": measure,
        "cuEventDestroy_v2": lambda event: 0, "cuEventQuery": lambda event: NOT_READY if state["running"] else 0,
    }  # fmt: skip
    monkeypatch.setattr(carveout_trial, "find_driver_call", calls.__getitem__)
    return state


def bind(driver, trial, recorded):
    """A launch whose graphs note the carve-out they were recorded with."""

    def record(percent):
        recorded.append(percent)
        return lambda: driver["ran"].append(percent)

    return TrialLaunch(trial, record, 1)


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
        driver["status"], trial = status, CarveoutTrial()
        launch = bind(driver, trial, [])
        for _ in range(TIMED + 1):
            launch()
        assert trial.chosen == DEFAULT


def test_programs_of_few_kernels_or_of_kernels_alike_are_not_tried():
    assert carveout_trial.is_worth_a_trial([0, 1024] * 4)
    assert not carveout_trial.is_worth_a_trial([0, 1024]) and not carveout_trial.is_worth_a_trial([1024] * 100)
