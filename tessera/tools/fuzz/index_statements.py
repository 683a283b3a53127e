"""Statements of random Graph programs that index: subscripts, gathers, scatters and updates."""

from __future__ import annotations

from tessera.tools.fuzz.choices import Choices
from tessera.tools.fuzz.value_pool import ValuePool, has_axes, is_number, rule


@rule(has_axes)
def _index(c: Choices, pool: ValuePool, name: str) -> str | None:
    sample = pool.samples[name]
    axis = c.draw(sample.ndim)
    size = sample.shape[axis]
    if not size:
        return None
    places = [c.draw(size) for _ in range(1 + c.draw(4))]
    kind = c.draw(4)
    if kind == 0:
        return f"ts.take({name}, ts.Tensor({places}), axis={axis})"
    rows = f"ts.Tensor({sorted(set(p % max(sample.shape[0], 1) for p in places))})"
    if kind == 1:
        return f"ts.scatter({name}, {rows}, ts.take({name}, {rows}, axis=0) * 2, axis=0)" if is_number(sample) else None
    if kind == 2:
        again = f"ts.Tensor({[p % max(sample.shape[0], 1) for p in places]})"
        return (
            f"ts.scatter_add({name}, {again}, ts.take({name}, {again}, axis=0), axis=0)" if is_number(sample) else None
        )
    return f"ts.take_along_axis({name}, ts.argsort({name}, axis={axis}), axis={axis})"


INDEX_LISTS = ("[0]", "[-1, 0]", "[0, 0, -1]", "[[0], [-1]]", "[]")


@rule(has_axes, 2)
def _subscript(c: Choices, pool: ValuePool, name: str) -> str | None:
    """A subscript with index lists, masks, new axes and ellipses: NumPy's rules of where index axes go."""
    return f"{name}[{_draw_subscript(c, pool.samples[name].shape)}]" if 0 not in pool.samples[name].shape else None


def _draw_subscript(c: Choices, shape: tuple[int, ...]) -> str:
    items = []
    for size in shape[: 1 + c.draw(len(shape))]:
        mask = [n % 2 == 0 for n in range(size)]
        kinds = (":", c.pick(INDEX_LISTS), str(c.draw(size)), f"-{1 + c.draw(size)}", "1:", "::-1", ":-1:2")
        items.append(c.pick((*kinds, str(mask)) if size < 10 else kinds))
    for extra in ("...", "None"):
        if c.chance(4):
            items.insert(c.draw(len(items) + 1), extra)
    return ", ".join(items)


@rule(lambda s: s.ndim > 0 and is_number(s) and 0 not in s.shape, 2)
def _update(c: Choices, pool: ValuePool, name: str) -> str:
    change = c.pick(("set", "add", "multiply", "min", "max"))
    index = _draw_subscript(c, pool.samples[name].shape).replace("None", "...")
    index = index if index.count("...") < 2 else "..."
    return f"{name}.at[{index}].{change}({c.pick(('2', f'{name}[{index}]', f'{name}[{index}] * 2', '0'))})"


@rule(lambda s: s.ndim > 0 and is_number(s) and s.shape[0] > 0, 2)
def _computed_index(c: Choices, pool: ValuePool, name: str) -> str:
    """Indices that the program computes: clipped numbers, places of extremes, orders; also negative ones."""
    rows = pool.samples[name].shape[0]
    flat = f"ts.reshape({name}, (-1,))[:{1 + c.draw(9)}]"
    index = c.pick((
        f"ts.clip(ts.cast({flat}, dtype=ts.int32), {-rows}, {rows - 1})",
        f"ts.argsort({flat})[:{rows}] % {rows}", f"ts.argmax({name}, axis=0) * 0 + {rows - 1}",
        f"ts.cast({flat} > 0, dtype=ts.int64) - 1", f"ts.topk({flat}, 1)[1] % {rows}",
    ))  # fmt: skip
    return c.pick((
        f"{name}[{index}]", f"ts.take({name}, {index}, axis=0)", f"{name}.at[{index}].add(1)",
        f"{name}.at[{index}].max({name}[{index}] * 2)", f"{name}.at[{index}].set(3)",
        f"ts.embedding(ts.reshape({name}, ({rows}, -1)), {index})", f"ts.one_hot({index} % {rows}, {rows})",
    ))  # fmt: skip


@rule(lambda s: s.ndim > 0 and is_number(s), 2)
def _ordered(c: Choices, pool: ValuePool, name: str) -> str:
    sample = pool.samples[name]
    axis = c.draw(sample.ndim)
    k = min(sample.shape[axis], 1 + c.draw(4))
    return c.pick((
        f"ts.topk({name}, {k}, axis={axis})[{c.draw(2)}]", f"ts.topk({name}, {k}, axis={axis}, largest=False)[0]",
        f"ts.cummax({name}, axis={axis})", f"ts.cummin({name}, axis={axis})",
        f"ts.searchsorted(ts.sort(ts.reshape({name}, (-1,))), {name}, side={c.pick(('left', 'right'))!r})",
        f"ts.count_nonzero({name}, axis={axis})", f"ts.sort({name}, axis={axis}, descending=True)",
    ))  # fmt: skip


@rule(lambda s: s.ndim >= 2)
def _axes(c: Choices, pool: ValuePool, name: str) -> str:
    """Axes exchanged, merged, cut and joined again: mostly views."""
    sample = pool.samples[name]
    axis, other = c.draw(sample.ndim), c.draw(sample.ndim)
    return c.pick((
        f"ts.swapaxes({name}, {axis}, {other})", f"ts.moveaxis({name}, {axis}, {other})", f"ts.flatten({name})",
        f"ts.concatenate(ts.unbind({name}, axis={axis})[::-1], axis={min(other, sample.ndim - 2)})",
        f"ts.stack(ts.unbind({name}, axis={axis})[::2], axis={min(other, sample.ndim - 1)})",
        f"ts.concatenate(ts.chunk({name}, 2, axis={axis})[::-1], axis={axis})", f"ts.diagonal({name}, {c.draw(3) - 1})",
        f"ts.triu({name}, {c.draw(3) - 1})", f"ts.tiled({name}, 2)", f"ts.diag(ts.reshape({name}, (-1,))[:5], 1)",
        f"ts.matrix_transpose({name})",
    ))  # fmt: skip


@rule(lambda s: s.ndim > 0 and is_number(s))
def _mask(c: Choices, pool: ValuePool, name: str) -> str:
    row = f"ts.arange({pool.samples[name].shape[-1]}) % 3 == {c.draw(3)}"
    return c.pick((
        f"ts.masked_fill({name}, {row}, {c.pick(('0', '1', '-2'))})", f"{name}.at[{name} > 0].set(1)",
        f"ts.where({row}, {name}, 0)", f"ts.clip({name}, {c.pick(('0', '-1', 'None'))}, 1)",
    ))  # fmt: skip
