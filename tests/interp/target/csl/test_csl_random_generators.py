"""Random programs of three generators: lockstep execution agrees with that of one PE after another."""

import pytest
from csl_random_generators import compiled, dsd_pipelines, observe, switched_routes, task_graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tessera.interp.target.csl.pe import lockstep_execution

SEARCH = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
ARCHES, SEEDS = st.sampled_from(["wse2", "wse3"]), st.sampled_from([None, None, 1, 2])


@pytest.fixture(autouse=True, scope="module")
def small_grids():
    """Enable lockstep execution on a line of PEs."""
    before, lockstep_execution.MIN_PES = lockstep_execution.MIN_PES, 2
    yield
    lockstep_execution.MIN_PES = before


def agree(folder, program, arch, seed):
    layout = compiled(folder, program, arch)
    found = observe(layout, seed, True)
    expected = observe(layout, seed, False)
    for name, value in expected.items():
        assert found[name] == value, name
    return found


@SEARCH
@given(program=task_graphs(), arch=ARCHES, seed=SEEDS)
def test_task_graphs(program, arch, seed, tmp_path):
    assert agree(tmp_path, program, arch, seed)["tasks"]


@SEARCH
@given(program=switched_routes(), arch=ARCHES, seed=SEEDS)
def test_switched_routes(program, arch, seed, tmp_path):
    assert sum(agree(tmp_path, program, arch, seed)["traffic"][0, 0][0]) > 0


@SEARCH
@given(program=dsd_pipelines(), arch=ARCHES, seed=SEEDS)
def test_dsd_pipelines(program, arch, seed, tmp_path):
    found = agree(tmp_path, program, arch, seed)
    assert not found["fault"] and not found["left"]
