"""Statements of random Graph programs with functions of their own: loops, branches, batches and derivatives."""

from __future__ import annotations

from typing import Any

from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.value_pool import ValuePool, is_float, is_number, rule

BODIES = ("s + y", "s * 0.5 + y", "ts.maximum(s, y)", "ts.where(y > s, s, y - s)", "ts.tanh(s) * y", "s - y * 2")


@rule(lambda s: s.ndim > 0 and is_number(s) and 0 < s.shape[0] <= 17, 2)
def _flow(c: Choices, pool: ValuePool, name: str) -> str:
    body, other = c.pick(BODIES), c.pick(BODIES)
    if not is_float(pool.samples[name]):
        body, other = (b.replace("s * 0.5", "s * 3").replace("ts.tanh(s)", "s") for b in (body, other))
    count = c.draw(4)
    return c.pick((
        f"ts.scan(lambda s, y: ({body}, {other}), {name}[0], {name})[1]",
        f"ts.scan(lambda s, y: ({body}, s), {name}[0], {name}, reverse=True)[0]",
        f"ts.fori_loop(0, {count}, lambda i, s: {body.replace('y', name)}, {name})",
        f"ts.while_loop(lambda i, s: i < {count}, lambda i, s: (i + 1, {body.replace('y', name)}), (0, {name}))[1]",
        f"ts.cond(ts.sum(ts.cast({name} > 0, dtype=ts.int32)) > {count}, "
        f"lambda s, y: {body}, lambda s, y: {other}, {name}, {name})",
        f"ts.vmap(lambda y: {body.replace('s', 'y', 1) if body[0] == 's' else 'y * 2'})({name})",
        f"ts.map(lambda y: y * 2{' - y[:1]' if pool.samples[name].ndim > 1 else ''}, {name})",
        f"ts.checkpoint(lambda s, y: {body})({name}, {name})",
    ))  # fmt: skip


@rule(lambda s: is_float(s) and s.dtype.bits >= 32 and s.type.policy is None)
def _derivative(c: Choices, pool: ValuePool, name: str) -> str:
    op = c.pick(
        ("tanh", "sin", "square", "exp", "softplus", "gelu", "sigmoid", "relu", "abs", "sinh", "cumsum", "softmax")
    )
    total = c.pick(("ts.sum(ts.square(ts.{}(z)))", "ts.sum(ts.{}(z) * z)", "ts.mean(ts.{}(z))", "ts.max(ts.{}(z))"))
    return f"ts.grad(lambda z: {total.format(op)})({name})"


STEPS = ("s * 0.5 + y", "ts.tanh(s + y)", "ts.maximum(s, y)", "s * y", "ts.where(y > s, s, y - s)", "ts.sin(s) - y")


def _is_differentiable(sample: Any) -> bool:
    """Whether a value has floats wide enough, and few enough, for derivatives of loops."""
    wide = is_float(sample) and sample.dtype.bits >= 32 and sample.type.policy is None
    return bool(wide and sample.ndim > 0 and 0 < sample.shape[0] <= 17 and sample.size <= 400)


@rule(_is_differentiable, 3)
def _derivative_of_flow(c: Choices, pool: ValuePool, name: str) -> str:
    """Derivatives of loops, branches and batches, in each mode and in each other."""
    step, count = c.pick(STEPS), c.draw(4)
    total = c.pick((
        f"ts.sum(ts.scan(lambda s, y: ({step}, {step}), z[0], z)[1])",
        f"ts.sum(ts.scan(lambda s, y: ({step}, s), z[0], z, reverse=True)[0])",
        f"ts.sum(ts.fori_loop(0, {count}, lambda i, s: {step.replace('y', 'z')}, z))",
        f"ts.sum(ts.cond(ts.sum(z) > {count}, lambda s, y: {step}, lambda s, y: s - y, z, z))",
        f"ts.sum(ts.vmap(lambda y: {step.replace('s', 'z[0]', 1) if step[0] == 's' else 'y * y'})(z))",
        f"ts.sum(ts.checkpoint(lambda s, y: {step})(z, z * 2))", "ts.max(z * z)", "ts.sum(ts.sort(z, axis=0) * z)",
        "ts.sum(ts.cumprod(z, axis=0))", "ts.prod(ts.sin(z))", "ts.sum(z[::-1] * ts.roll(z, 1, axis=0))",
        "ts.sum(z.at[0].set(2.0) * z)", "ts.sum(ts.take(z, ts.Tensor([0, 0, -1]), axis=0) ** 2)", "ts.std(z)",
        "ts.logsumexp(z)", "ts.sum(ts.softmax(z) * z)", "ts.sum(ts.topk(z, 1, axis=0)[0])", "ts.norm(z)",
    ))  # fmt: skip
    total = total.replace("y", "q") if "lambda" not in total else total
    return c.pick((
        f"ts.grad(lambda z: {total})({name})", f"ts.jvp(lambda z: {total}, ({name},), ({name} * 0.5,))[1]",
        f"ts.vmap(ts.grad(lambda z: {total}))(ts.stack([{name}, {name} * 0.5]))",
        f"ts.grad(lambda w: ts.sum(ts.grad(lambda z: {total})(w) * w))({name})",
        f"ts.value_and_grad(lambda z: {total})({name})[0]",
        f"ts.grad(lambda w: ts.sum(ts.vmap(lambda z: {total})(ts.stack([w, w * 2]))))({name})",
        f"ts.jvp(ts.grad(lambda z: {total}), ({name},), ({name},))[1]",
    ))  # fmt: skip


@rule(lambda s: s.ndim > 0 and is_number(s) and 0 < s.shape[0] <= 17 and s.size <= 2000, 2)
def _batched_flow(c: Choices, pool: ValuePool, name: str) -> str:
    """Loops and branches whose lanes go other ways: counts and conditions that depend on the lane."""
    count = c.draw(4)
    half = "s * 0.5" if is_float(pool.samples[name]) else "s // 2"
    return c.pick((
        f"ts.vmap(lambda y: ts.while_loop(lambda i, s: i < ts.sum(ts.cast(y > 0, dtype=ts.int32)) % 5, "
        f"lambda i, s: (i + 1, {half} + y), (0, y))[1])({name})",
        f"ts.vmap(lambda y: ts.cond(ts.max(y) > {count}, lambda s: s * 2, lambda s: {half}, y))({name})",
        f"ts.vmap(lambda y: ts.fori_loop(0, {count}, lambda i, s: {half} + y * i, y))({name})",
        f"ts.vmap(lambda y: ts.scan(lambda s, r: ({half} + r, s), y, {name})[1], out_axes=1)({name})",
        f"ts.scan(lambda s, y: ts.cond(ts.max(y) > {count}, lambda: (s, y), lambda: (y, s)), {name}[0], {name})[1]",
        f"ts.scan(lambda s, y: (s, ts.scan(lambda r, q: (r + q * {count}, r), y, {name})[1]), {name}[0], {name})[1]",
        f"ts.fori_loop(0, {pool.samples[name].shape[0]}, lambda i, s: s.at[i].add({name}[i] * i), {name})",
        f"ts.fori_loop(0, {count}, lambda i, s: (s[1], s[0] + 1), ({name}, {name} * 2))[0]",
        f"ts.fold(lambda a, b: a + b * {count}, {name})", f"ts.vmap(ts.vmap(lambda y: y * y - 1))({name})",
        f"ts.vmap(lambda y: ts.sort(y)[::-1] if y.ndim else y, in_axes={pool.samples[name].ndim - 1})({name})",
        f"ts.vmap(lambda y: y.at[0].set(1) if y.ndim else y)({name})",
        f"ts.vmap(lambda y, i: ts.take({name}, i, axis=0) + y)({name}, ts.arange({pool.samples[name].shape[0]}))",
        f"ts.while_loop(lambda s: ts.sum(ts.cast(s > 0, dtype=ts.int32)) > 99, lambda s: s - 1, {name})",
    ))  # fmt: skip
