"""The numbers of the ops below Graph (O, A, T, L, E): each use verifies, and with another form it is refused."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tessera.core.types import RefType, f64, scalar
from tessera.ir.core import Attrs, Block, Function, Module, Value
from tessera.ir.levels import LEVELS
from tessera.ir.rewrite import eliminate_dead_code
from tessera.ir.verify import VERIFIER_RULES, verify

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import semantics_levels as levels  # noqa: E402
from semantics_examples import MARK  # noqa: E402

PAGES = {name: (levels.FOLDER / name).read_text().partition(MARK)[2] for name in levels.PAGES}
OPS = {op.name: op for dialects in levels.PAGES.values() for d in dialects for op in levels.list_ops(d)}
USED = [name for name in OPS if name not in levels.WITHOUT_USE]
NUMBERS = dict(re.findall(r"^- \*\*([\w.]+\.[OATLE])\*\* (.*)\.$", "\n".join(PAGES.values()), re.M))


def test_the_lists_are_what_the_definitions_give():
    assert {page: levels.make_list(page) for page in levels.PAGES} == PAGES


def test_the_script_checks():
    assert "--check" in levels.__doc__
    subprocess.run([sys.executable, levels.__file__, "--help"], check=True, capture_output=True)


def test_each_op_has_its_numbers():
    for name, op in OPS.items():
        letters = {n.rpartition(".")[2] for n in NUMBERS if n.rpartition(".")[0] == name}
        assert letters == set("OATL") | ({"E"} if op.effects else set()), name
    assert set(levels.WITHOUT_USE) <= set(OPS) and not set(levels.WITHOUT_USE) & set(levels.find_uses())


def rebuild(block, node, made):
    """A block with a node replaced, in regions too."""

    def rewrite(each):
        regions = tuple(rebuild(r, node, made) for r in each.regions)
        return made if each is node else dataclasses.replace(each, regions=regions) if regions else each

    return Block(block.params, tuple(map(rewrite, block.nodes)), block.results)


def with_node(name, **changes):
    """The module of a use, in which the node of the op has other fields."""
    module, function, node = levels.find_uses()[name]
    made = dataclasses.replace(node, **changes)
    other = dataclasses.replace(function, body=rebuild(function.body, node, made))
    return dataclasses.replace(module, functions=tuple(other if f is function else f for f in module.functions))


def find_violations(rule, module):
    return [v for v in VERIFIER_RULES[rule](module, LEVELS[module.level]) if v.where is not None]


@pytest.mark.parametrize("name", USED)
def test_each_use_verifies(name):
    verify(levels.find_uses()[name][0])


@pytest.mark.parametrize("name", USED)
def test_other_operands_are_refused(name):
    node = levels.find_uses()[name][2]
    ref, number = Value(RefType((), f64)), Value(scalar(f64))
    forms = [
        node.args[:-1],
        (*node.args, ref),
        (*node.args, number, number),
        (ref, *node.args[1:]),
        (number, *node.args[1:]),
    ]
    rules = ("V2", "V5") if name == "host.launch" else ("V2",)
    assert any(find_violations(rule, with_node(name, args=form)) for form in forms for rule in rules)


@pytest.mark.parametrize("name", USED)
def test_other_attributes_are_refused(name):
    attrs = dict(levels.find_uses()[name][2].attrs)
    said = re.findall(r"`(\w+): ", NUMBERS[f"{name}.A"])
    assert said == list(attrs) or set(said) == set(attrs)
    assert find_violations("V7", with_node(name, attrs=Attrs({**attrs, "another": 1})))
    for each in attrs:
        assert find_violations("V7", with_node(name, attrs=Attrs({k: v for k, v in attrs.items() if k != each})))


@pytest.mark.parametrize("name", USED)
def test_other_results_are_refused(name):
    results = levels.find_uses()[name][2].results
    assert not find_violations("V2", levels.find_uses()[name][0])
    assert find_violations("V2", with_node(name, results=(*results, Value(scalar(f64)))))


@pytest.mark.parametrize("name", OPS)
def test_scopes(name):
    stated = NUMBERS[f"{name}.L"].removeprefix("In ").split(", ")
    assert stated and set(stated) == {n for n, scope in levels.list_scopes().items() if scope.legal(OPS[name])}
    alone = Function("f", Block((), (levels.make_bare_node(OPS[name]),), ()))
    assert find_violations("V3", Module("graph", (alone,)))
    if name in USED:
        assert not find_violations("V3", levels.find_uses()[name][0])


@pytest.mark.parametrize("name", OPS)
def test_effects(name):
    alone = Function("f", Block((), (levels.make_bare_node(OPS[name]),), ()))
    stays = bool(eliminate_dead_code(alone).body.nodes)
    said = NUMBERS.get(f"{name}.E", "it may be removed")
    assert stays == (not said.endswith("it may be removed"))
