"""Differences of modules: a renumbered value is no change, another operand is one."""

from hypothesis import given
from hypothesis import strategies as st

from tessera.tools.inspector.differences import compare_lines, count_changes

OPS = ["%0 = a()", "%1 = b(%0)", "%2 = c(%0, %1)", "d(%2)"]


def test_renumbered_values_are_equal():
    assert compare_lines(OPS, ["%0 = a()", "%9 = b(%0)", "%3 = c(%0, %9)", "d(%3)"]) == [("=", 0, 0, 4)]


def test_a_removed_op_renumbers_without_a_change():
    assert compare_lines(["%0 = x()", "%1 = y()", "%2 = f(%1)"], ["%0 = y()", "%1 = f(%0)"]) == [
        ("-", 0, 0, 1),
        ("=", 1, 0, 2),
    ]


def test_another_operand_is_a_change():
    found = compare_lines(OPS, [*OPS[:2], "%2 = c(%1, %0)", OPS[3]])
    assert found == [("=", 0, 0, 2), ("~", 2, 2, 1), ("=", 3, 3, 1)] and count_changes(found) == (1, 1)


def test_numbers_begin_again_in_each_function():
    text = ['"ts.func"() ({', "^bb0(%0: t, %1: t):", "use(%1)", '"ts.func"() ({', "^bb0(%0: t, %1: t):", "use(%1)"]
    swapped = [*text[:4], "^bb0(%1: t, %0: t):", "use(%0)"]
    assert compare_lines(text, swapped) == [("=", 0, 0, 6)]
    assert compare_lines(text, [*text[:5], "use(%0)"])[-1] == ("~", 5, 5, 1)


@given(
    st.lists(st.sampled_from([*OPS, "", "e(%1)"]), max_size=9), st.lists(st.sampled_from([*OPS, "f(%0)"]), max_size=9)
)
def test_the_entries_rebuild_both_texts(before, after):
    a, b = [], []
    for kind, i, j, n in compare_lines(before, after):
        assert n > 0 and (kind == "+" or i == len(a)) and (kind == "-" or j == len(b))
        a += before[i : i + n] if kind != "+" else []
        b += after[j : j + n] if kind != "-" else []
    assert a == before and b == after
