"""Policies that store otherwise than by nearest-even: which those are, and what generators without them say."""

from __future__ import annotations

from tessera.errors import Location, UnsupportedOpError
from tessera.ir.core import Node
from tessera.types import Policy

PLAIN = {"rounding": "nearest", "saturate": False, "denormals": "preserve"}


def special(policy: Policy | None) -> bool:
    """Whether a policy stores otherwise than by nearest-even."""
    return policy is not None and any(getattr(policy, k) != known for k, known in PLAIN.items())


def refuse(target: str, text: str, location: Location) -> UnsupportedOpError:
    """The error for a policy that a target does not have."""
    return UnsupportedOpError(
        f"the target {target} does not round by the policy {text}", location=location,
        expected="nearest-even, denormals preserved", suggestion="run this in the interpreter, or leave the clause out",
    )  # fmt: skip


def check_plain(node: Node, target: str) -> None:
    """Refuse an op whose results a policy rounds otherwise than to nearest even.

    Raises:
        UnsupportedOpError: a result's policy asks for another rounding, saturation or flushed denormals.
    """
    for v in node.results:
        policy = getattr(v.type, "policy", None)
        wrong = [f"{k}={getattr(policy, k)}" for k, known in PLAIN.items() if policy and getattr(policy, k) != known]
        if wrong:
            raise refuse(target, ", ".join(wrong), node.loc)
