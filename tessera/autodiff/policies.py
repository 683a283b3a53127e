"""What a checkpoint keeps for the way back, besides its arguments: its policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tessera.errors import ArgumentError, here
from tessera.ir.core import Block, Value
from tessera.ops.linalg import dot
from tessera.ops.recompute import kept
from tessera.pytree import map_leaves
from tessera.tensor import as_tensor

# policy(name of an op without its dialect) says whether its results are kept.
Policy = str | Callable[[str], bool] | None


def _marked(block: Block) -> list[Value]:
    return [n.args[0] for n in block.nodes if n.op is kept]


NAMED: dict[str, Callable[[Block], list[Value]]] = {
    "full": lambda block: [],
    "selective": _marked,
    "dots": lambda block: [n.out for n in block.nodes if n.op is dot],
    "everything": lambda block: [v for n in block.nodes for v in n.results],
}


def checked(policy: Policy) -> Policy:
    """A policy, if it is one.

    Raises:
        ArgumentError: there is no such policy.
    """
    if policy is None or callable(policy) or policy in NAMED:
        return policy
    raise ArgumentError(
        f"there is no checkpoint policy {policy!r}", location=here(),
        expected=f"{', '.join(NAMED)}, or a function of an op's name",
    )  # fmt: skip


def values_kept(policy: Policy, block: Block) -> list[Value]:
    """The values of a block that a policy keeps, each once; parameters are kept in any case."""
    if callable(policy):
        found = [v for n in block.nodes if policy(n.op.__name__) for v in n.results]
    else:
        found = NAMED[policy or "full"](block)
    params = set(block.params)
    return [v for v in dict.fromkeys(found) if v not in params]


def checkpoint_here(value: Any) -> Any:
    """`value` (a tensor or a container of them), which the checkpoint with policy "selective" around it keeps.

    Everywhere else it changes nothing.

    >>> checkpoint_here(2.0)
    Tensor(2., f32)
    """
    return map_leaves(lambda x: kept(as_tensor(x)), value)
