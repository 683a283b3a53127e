"""What generators that round to nearest even alone say of other policies."""

from __future__ import annotations

from tessera.errors import UnsupportedOpError
from tessera.ir.core import Node

PLAIN = {"rounding": "nearest", "saturate": False, "denormals": "preserve"}


def check_plain(node: Node, target: str) -> None:
    """Refuse an op whose results a policy rounds otherwise than to nearest even.

    Raises:
        UnsupportedOpError: a result's policy asks for another rounding, saturation or flushed denormals.
    """
    for v in node.results:
        policy = getattr(v.type, "policy", None)
        wrong = [f"{k}={getattr(policy, k)}" for k, known in PLAIN.items() if policy and getattr(policy, k) != known]
        if wrong:
            raise UnsupportedOpError(
                f"the target {target} does not round by the policy {', '.join(wrong)}", location=node.loc,
                expected="nearest-even, denormals preserved",
                suggestion="run this in the interpreter, or leave the clause out",
            )  # fmt: skip
