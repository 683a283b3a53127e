"""Federated learning: averages of clients' updates, of which the server sees only the sum.

Secure aggregation by pairwise masks (Bonawitz et al., CCS 2017): each pair of clients shares a secret seed; one adds
the mask that it expands to, the other subtracts it. A masked update is uniformly distributed, and the masks cancel in
the sum of all. Updates are integers modulo 2^64 (fixed point), so that they cancel exactly.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from tessera.core.errors import ArgumentError, DeviceUnavailable, ShapeError, user_location
from tessera.core.pytree import flatten
from tessera.ir.tensor import Tensor, as_tensor

FRACTION_BITS = 32  # of the fixed point: updates of up to 2^31 / clients, to 2^-33
_WHOLE_BITS = 63 - FRACTION_BITS


class MaskedClient:
    """A client of an aggregation: its number, and the seeds that it shares with the others.

    A real client agrees on its seeds by Diffie-Hellman; here `make_clients` deals them.
    """

    def __init__(self, number: int, seeds: Mapping[int, bytes]) -> None:
        self.number, self.seeds = number, dict(seeds)

    def mask(self, update: Any) -> np.ndarray:
        """The update as the server sees it: uint64 numbers, of which each alone is uniformly distributed.

        Raises:
            ArgumentError: a number is not finite, or too large for the fixed point.
        """
        flat = _flatten_update(update)
        masked = _encode(flat, len(self.seeds) + 1)
        for other, seed in self.seeds.items():
            noise = expand_seed(seed, flat.size)
            masked = masked + noise if self.number < other else masked - noise
        return masked

    def reveal(self, dropped: Sequence[int]) -> dict[int, bytes]:
        """The seeds shared with clients that have dropped out, with which the server removes their masks."""
        return {n: self.seeds[n] for n in dropped}


def make_clients(count: int) -> list[MaskedClient]:
    """Clients that share a fresh secret seed in each pair.

    Raises:
        ArgumentError: there are fewer than two.
    """
    if count < 2:
        raise ArgumentError(
            "an aggregation hides nothing of one client", location=user_location(), expected="2 or more clients",
            received=str(count),
        )  # fmt: skip
    seeds = {(i, j): secrets.token_bytes(32) for i in range(count) for j in range(i + 1, count)}
    return [MaskedClient(i, {j: seeds[min(i, j), max(i, j)] for j in range(count) if j != i}) for i in range(count)]


def expand_seed(seed: bytes, count: int) -> np.ndarray:
    """`count` pseudorandom uint64 numbers of a seed, by SHAKE-256."""
    return np.frombuffer(hashlib.shake_256(seed).digest(8 * count), np.uint64)


def unmask_sum(
    masked: Mapping[int, np.ndarray], revealed: Sequence[tuple[int, Mapping[int, bytes]]] = ()
) -> np.ndarray:
    """The sum of the updates of the clients whose masked updates arrived, as float64.

    `masked` has them by client; `revealed` are, for clients that dropped out, what each of the others reveals:
    (client, its seeds by dropped client).

    Raises:
        ArgumentError: a seed of a missing client is missing, too.
    """
    if not masked:
        raise ArgumentError("no update has arrived", location=user_location())
    total = np.zeros_like(next(iter(masked.values())))
    for update in masked.values():
        total = total + update
    for number, seeds in revealed:
        for other, seed in seeds.items():
            noise = expand_seed(seed, total.size)
            total = total - noise if number < other else total + noise
    return total.view(np.int64) / 2.0**FRACTION_BITS


def _encode(flat: np.ndarray, clients: int) -> np.ndarray:
    limit = 2.0**_WHOLE_BITS / clients
    if not np.isfinite(flat).all() or np.abs(flat).max(initial=0.0) >= limit:
        raise ArgumentError(
            "an update is not finite, or too large to be hidden", location=user_location(),
            expected=f"numbers below {limit:.3g}", received=f"{np.abs(flat).max(initial=0.0):.3g}",
            suggestion="clip it: ts.optim.clip_by_norm",
        )  # fmt: skip
    return np.round(flat * 2.0**FRACTION_BITS).astype(np.int64).view(np.uint64)


def _flatten_update(update: Any) -> np.ndarray:
    leaves = [as_tensor(x).numpy().astype(np.float64).reshape(-1) for _, x in flatten(update, "")[0]]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def secure_aggregate(updates: Sequence[Any], method: str = "masks", weights: Sequence[float] | None = None) -> Any:
    """The mean of clients' updates (containers of tensors), of which only the sum is ever seen.

    `method="masks"` hides each update by pairwise masks; "homomorphic" encrypts it (Paillier 1999, through the package
    phe; slow, for few numbers). `weights` are the clients' shares, such as their numbers of examples.

    Raises:
        ArgumentError: fewer than two updates, another method, or weights that are none.
        ShapeError: the updates differ in shape.
        DeviceUnavailable: phe is not installed.

    >>> secure_aggregate([Tensor([1.0, 2.0]), Tensor([3.0, 6.0])])
    Tensor([2., 4.], f32)
    """
    if method not in METHODS:
        raise ArgumentError(
            f"{method!r} is no method of aggregation", location=user_location(), expected=" or ".join(METHODS)
        )
    if not isinstance(updates, (list, tuple)):
        raise ArgumentError("updates are a list, one of each client", location=user_location(),
                            received=type(updates).__name__)  # fmt: skip
    shares = _find_shares(len(updates), weights)
    shapes = [[as_tensor(x).type for _, x in flatten(u, "")[0]] for u in updates]
    if any(s != shapes[0] for s in shapes):
        raise ShapeError(
            "the updates of clients differ in shape", location=user_location(),
            expected=", ".join(map(str, shapes[0])),
            received=", ".join(map(str, next(s for s in shapes if s != shapes[0]))),
        )  # fmt: skip
    flat = [_flatten_update(u) * share for u, share in zip(updates, shares, strict=True)]
    return _rebuild(updates[0], METHODS[method](flat))


def _find_shares(count: int, weights: Sequence[float] | None) -> list[float]:
    given = [1.0] * count if weights is None else [float(w) for w in weights]
    if count < 2 or len(given) != count or not all(math.isfinite(w) and w >= 0 for w in given) or not sum(given):
        raise ArgumentError(
            "there is nothing to aggregate", location=user_location(),
            expected="two or more updates, and a weight of 0 or more for each",
            received=f"{count} updates, weights {weights}",
        )  # fmt: skip
    return [w / sum(given) for w in given]


def _rebuild(like: Any, flat: np.ndarray) -> Any:
    leaves, tree = flatten(like, "")
    made, place = [], 0
    for _, leaf in leaves:
        tensor = as_tensor(leaf)
        size = math.prod(tensor.shape)
        made.append(Tensor(flat[place : place + size].reshape(tensor.shape).astype(tensor.dtype.numpy)))
        place += size
    return tree.build(iter(made))


def _aggregate_masked(flat: Sequence[np.ndarray]) -> np.ndarray:
    clients = make_clients(len(flat))
    return unmask_sum({c.number: c.mask(u) for c, u in zip(clients, flat, strict=True)})


def _aggregate_encrypted(flat: Sequence[np.ndarray]) -> np.ndarray:
    try:
        paillier = import_module("phe.paillier")
    except ImportError:
        raise DeviceUnavailable(
            "homomorphic aggregation needs the package phe", location=user_location(),
            suggestion='pip install "tessera[privacy]", or method="masks"',
        ) from None  # fmt: skip
    public, private = paillier.generate_paillier_keypair()
    totals = [public.encrypt(float(x)) for x in flat[0]]
    for update in flat[1:]:
        totals = [t + public.encrypt(float(x)) for t, x in zip(totals, update, strict=True)]
    return np.array([private.decrypt(t) for t in totals])


METHODS: dict[str, Callable[[Sequence[np.ndarray]], np.ndarray]] = {
    "masks": _aggregate_masked,
    "homomorphic": _aggregate_encrypted,
}


def federated(kind: type) -> type:
    """A class with `train_round(clients, global_model)`, which gets `run(rounds, clients, model)`.

    Raises:
        ArgumentError: it has no `train_round`.
    """
    if not callable(getattr(kind, "train_round", None)):
        raise ArgumentError(
            "@ts.federated decorates a class with train_round(clients, global_model)", location=user_location(),
            received=repr(kind)[:80],
        )  # fmt: skip

    def run(self: Any, rounds: int, clients: Sequence[Any], global_model: Any) -> Any:
        """The model after some rounds."""
        for _ in range(rounds):
            global_model = self.train_round(clients, global_model)
        return global_model

    kind.run = getattr(kind, "run", run)  # type: ignore[attr-defined]
    return kind


class _Federation(ModuleType):
    """The module, which also decorates classes: `@ts.federated`."""

    def __call__(self, kind: type) -> type:
        """A class of the user."""
        return federated(kind)


sys.modules[__name__].__class__ = _Federation
