"""docs/kernel-language.md names every operation there is, and none that is not."""

import re
from pathlib import Path

import tessera as ts
from tessera import tile
from tessera.frontend.kernel.tile_api.matrix import FragmentFactory
from tessera.frontend.kernel.tile_api.synchronisation import CooperativeGroup, MBarrier

PAGE = (Path(__file__).parents[3] / "docs" / "kernel-language.md").read_text()
NAMED = {name for code in re.findall(r"`([^`]+)`", PAGE) for name in re.findall(r"[A-Za-z_]\w*", code)}


def public(kind):
    return {n for n in vars(kind) if not n.startswith("_")}


def test_every_operation_is_named():
    assert set(tile.__all__) - NAMED == set()


def test_every_method_is_named():
    shared = public(CooperativeGroup) | public(FragmentFactory) | {"init", "arrive", "expect", "wait"}
    assert shared - NAMED == set()
    assert {"with_schedule", "schedule", "autotune", "auto"} <= NAMED & {*vars(ts.kernel)}
    assert {"init", "arrive", "expect", "wait"} <= public(MBarrier)


def test_what_stands_first_in_a_row_exists():
    known = {
        *tile.__all__,
        *public(CooperativeGroup),
        *public(MBarrier),
        *public(ts.Kernel),
        *vars(ts.kernel),
        "assert",
        "fragment",
    }
    for line in PAGE.split("## Where a tile is")[1].split("## Python that kernels")[0].splitlines():
        for code in re.findall(r"`([^`]+)`", line.split("|")[1]) if line.startswith("| `") else ():
            name = re.match(r"\.?([a-z_]\w*)(?=$|\(|\.)", code)
            assert name is None or name[1] in known or name[1] in ("bar", "with", "ts"), code
