"""The manifest of the suite: the name of every case, the profiles that select it, and how its results are compared."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import tessera as ts
from conformance.case import PROFILES, Case, in_profile

FORMAT = 1  # of the manifest


def make_manifest(cases: Iterable[Case]) -> bytes:
    """The cases as JSON, in their order."""
    listed = [_describe_case(case) for case in cases]
    profiles = {name: sum(name in case["profiles"] for case in listed) for name in PROFILES}
    content = {"format": FORMAT, "version": ts.__version__, "profiles": profiles, "cases": listed}
    return (json.dumps(content, indent=1) + "\n").encode()


def _describe_case(case: Case) -> Mapping[str, Any]:
    return {
        "name": case.name, "level": case.name.partition("/")[0],
        "profiles": [name for name in PROFILES if in_profile(case, name)], "compared": _name_comparison(case),
        "debug": case.debug, "ranks": 1 if case.mesh is None else case.mesh.size,
    }  # fmt: skip


def _name_comparison(case: Case) -> str:
    """How results are judged: by an expected error, equality, the bits of the interpreter, or the error bound."""
    if case.rejects is not None:
        return f"error {case.rejects.__name__}"
    return "equal" if case.exact else "bits" if case.alike else "bound"
