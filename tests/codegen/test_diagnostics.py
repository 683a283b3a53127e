"""Diagnostic records: which failed assertion of a launch is raised, and with which values."""

import numpy as np

from tessera.codegen.diagnostics import ASSERT_PROGRAM_BIT, decode_first_failure

SITES = [
    {"text": text, "place": ["a.py", 1, 1, 1], "group": 1, "shape": [8], "values": ["int64"]} for text in ("one", "two")
]


def record(key, site, value):
    return np.array([key, site, value, *[0] * 13], np.uint64)


def test_two_assertions_that_fail_at_one_element_keep_their_values():
    keys = np.array([3, 3], np.uint64)
    records = np.concatenate([np.zeros(1, np.uint64), record(3, 1, 20), record(3, 0, 10)]).view(np.uint8)
    said = str(decode_first_failure(SITES, (1,), keys, records))
    assert "one" in said and "element (3,) with 10" in said


def test_the_first_failed_assertion_of_a_program_is_raised():
    keys = np.array([(1 << ASSERT_PROGRAM_BIT) + 5, (1 << ASSERT_PROGRAM_BIT) + 2], np.uint64)
    said = str(decode_first_failure(SITES, (2,), keys, None))
    assert "one" in said and "program (1,), element (5,)" in said
