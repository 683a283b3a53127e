"""Every op, one file per family; importing this gives Tensor its operators."""

import tessera.evaluate  # gives composites their type rule  # noqa: F401
from tessera.ops import (
    arrange,
    basic,
    checks,
    control,
    creation,
    cumulative,
    decompose,
    elementwise,
    elementwise_rules,
    functions,
    group,
    host,
    linalg,
    methods,
    nn,
    reduce,
    reduce_rules,
    schedule,
    shape,
    sort,
    statistics,
    structure_rules,
    tile,
    update,
)

methods.attach()
assert all((elementwise_rules, reduce_rules, structure_rules))  # derivatives and batching: they fill tables

__all__ = [
    "arrange",
    "creation",
    "cumulative",
    "decompose",
    "sort",
    "statistics",
    "basic",
    "checks",
    "control",
    "elementwise",
    "functions",
    "group",
    "host",
    "linalg",
    "nn",
    "reduce",
    "schedule",
    "shape",
    "tile",
    "update",
]
