"""The training loop: compiled steps over any iterable of batches, with a progress bar, metrics and checkpoints."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tessera.core.errors import ArgumentError, FileError, NonFiniteError, TesseraError, user_location
from tessera.core.hooks import check_finite
from tessera.core.pytree import flatten, map_leaves
from tessera.core.types import f32, to_python_numbers
from tessera.frontend.jit.tracing import jit
from tessera.ir.tensor import Tensor, as_tensor, wrap_array
from tessera.nn.module import Module
from tessera.ops.tensor.basic import cast
from tessera.ops.tensor.elementwise import bitwise_and, where
from tessera.ops.tensor.random import get_random_state
from tessera.ops.tensor.reduce import all as reduce_all
from tessera.ops.tensor.scalar_functions import isfinite
from tessera.optim.gradients import clip_by_norm, global_norm
from tessera.optim.optimizer import Optimizer, wide_type
from tessera.runtime.tensor_files import load, save
from tessera.train.data import check_batch, count_examples, read_batch
from tessera.train.metrics import CsvLog, TensorBoardLog
from tessera.transforms.autodiff.gradients import value_and_grad

Loss = Callable[..., Any]
RESERVED = ("step", "epoch", "loss", "lr", "norm", "scale", "examples/s")  # names of the history that the loop fills
TITLES = {"loss": "loss", "lr": "learning rate", "norm": "norm of the gradients"}


class Loop:
    """A training loop: `Loop(model, optimizer, loss).run(data, epochs=3)`.

    `loss(model, *batch)` (or by name, for batches that are dicts) gives a scalar, or a scalar and a dict of metrics.
    A step is one compiled program on `target`. After a run `model`, `state` and `history` have the results.

    `csv` and `tensorboard` name a file and a folder for metrics. With `checkpoint`, a folder, every `checkpoint_every`
    steps and at the end of a run everything is saved atomically; the newest `keep` files are kept, and `resume` goes
    on from there bit for bit. `clip_norm` limits the norm of gradients; `scaler` is a `ts.LossScaler` for f16.

    Raises:
        NonFiniteError: the loss is NaN or infinite; it names the step, and the op that made it. The model is that
            before the step.
    """

    def __init__(
        self, model: Module, optimizer: Optimizer, loss: Loss, *, target: str | None = None,
        clip_norm: float | None = None, scaler: Any = None, csv: str | Path | None = None,
        tensorboard: str | Path | None = None, checkpoint: str | Path | None = None, checkpoint_every: int = 0,
        keep: int = 2, progress: bool | None = None,
    ) -> None:  # fmt: skip
        for name, value, kind in (("model", model, Module), ("optimizer", optimizer, Optimizer)):
            if not isinstance(value, kind):
                raise ArgumentError(
                    f"the {name} is a {type(value).__module__}.{type(value).__name__}",
                    location=user_location(),
                    expected=f"a tessera {kind.__name__}",
                )
        keep, checkpoint_every = to_python_numbers((keep, checkpoint_every))
        for name, number, least in (("keep", keep, 1), ("checkpoint_every", checkpoint_every, 0)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ArgumentError(
                    f"{name} is {number!r}", location=user_location(), expected=f"an integer from {least} on"
                )
        self.model, self.optimizer, self.loss, self.target = model, optimizer, loss, target
        self.state = optimizer.init(model)
        self.step = self.epoch = self.batch = 0
        self.history: list[dict[str, float]] = []
        self.clip_norm, self.scaler = clip_norm, scaler
        self.checkpoint = None if checkpoint is None else Path(checkpoint)
        self.checkpoint_every, self.keep = checkpoint_every, keep
        self._logs: list[Any] = [] if csv is None else [CsvLog(csv)]
        self._logs += [] if tensorboard is None else [TensorBoardLog(tensorboard)]
        self._shows = sys.stderr.isatty() if progress is None else progress
        # The loop's own copies are given up in each step, which updates them in place.
        self._compiled = jit(self.update, target=target, donate=("model", "state"))
        self._owns = False

    # One step.

    def update(self, model: Module, state: Any, scale: Any, args: Any, named: Any) -> Any:
        """A step as a pure function: the new model and state, the loss, and the metrics of the step."""

        def compute(model: Module) -> Any:
            check_batch(self.loss, model, args, named)
            found = self.loss(model, *args, **named)
            value, metrics = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
            if not isinstance(value, Tensor) or not isinstance(metrics, Mapping):
                raise ArgumentError(
                    "the loss function returns something else", location=user_location(),
                    expected="a scalar tensor, or a scalar tensor and a dict of metrics",
                    received=", ".join(type(x).__name__ for x in (found if isinstance(found, tuple) else (found,))),
                )  # fmt: skip
            taken = sorted(name for name in metrics if name in RESERVED)
            if taken:
                raise ArgumentError(
                    f"the metric {taken[0]!r} has a name of the loop's own", location=user_location(),
                    expected=f"other names than {', '.join(RESERVED)}", suggestion=f"rename it: 'my_{taken[0]}'",
                )  # fmt: skip
            return cast(value, dtype=f32) * scale if self.scaler else value, (value, dict(metrics), model)

        (_, (value, metrics, after)), grads = value_and_grad(compute, has_aux=True)(model)
        grads = _unscale(grads, scale) if self.scaler else grads
        if self.clip_norm is None:
            norm = global_norm(grads)
        else:
            grads, norm = clip_by_norm(grads, self.clip_norm)
        rate = self.optimizer.rate(as_tensor(state["step"]))
        metrics["norm"] = norm
        good = bitwise_and(isfinite(value), isfinite(norm))
        good = bitwise_and(good, isfinite(rate)) if isinstance(rate, Tensor) else good
        after = _undo_unless(good, after, model)  # a bad step changes nothing
        new, made = self.optimizer.update(after, grads, state, good=good)
        return new, made, value, {"lr": rate, **metrics}, good

    def _run_step(self, batch: Any) -> dict[str, float]:
        """Run a step on a batch and take its results, unless they are not finite."""
        args, named = batch
        random = get_random_state().save()
        scale = self.scaler.factor if self.scaler else 1.0
        if not self._owns:
            self.model, self.state, self._owns = _copy(self.model), _copy(self.state), True
        self.model, self.state, value, metrics, good = self._compiled(self.model, self.state, scale, args, named)
        row = {"loss": float(as_tensor(value).item()), **{n: float(as_tensor(m).item()) for n, m in metrics.items()}}
        wrong = [n for n in ("loss", "lr", "norm") if not math.isfinite(row[n]) and not (n == "norm" and self.scaler)]
        if wrong:
            get_random_state().restore(random)
            raise self._explain(f"the {TITLES[wrong[0]]} is {row[wrong[0]]}", wrong[0] == "lr", args, named)
        if self.scaler:
            row["scale"] = self.scaler.update(bool(good))
        return row

    def _explain(self, problem: str, is_rate: bool, args: Any, named: Any) -> NonFiniteError:
        """The error of a number that is not finite: the first op that made such a number, in the interpreter."""
        what = f"{problem} in step {self.step + 1}"
        if is_rate:
            return NonFiniteError(what, expected="a finite number", suggestion="check the schedule of the optimizer")
        given = {**{str(i): x for i, x in enumerate(args)}, **named}
        for name, tree in (("parameter {}", self.model), ("array {} of the batch", given)):
            for path, leaf in flatten(tree)[0]:
                if isinstance(leaf, Tensor) and leaf.dtype.is_float and not bool(reduce_all(isfinite(leaf))):
                    return NonFiniteError(f"{what}: {name.format(path)} holds NaN or infinite elements before it")
        try:
            with check_finite():
                jit(self.update, target="interp")(self.model, self.state, 1.0, args, named)
        except TesseraError as error:
            kept = "the model of the loop is the one before this step" if isinstance(error, NonFiniteError) else None
            found = NonFiniteError(
                f"{what}: {error.message}", location=error.location, received=error.received, suggestion=kept
            )
            found.scope = error.scope
            return found
        return NonFiniteError(f"{what}; in the interpreter it is finite", suggestion="compare with tessera bisect")

    # A run.

    def run(self, data: Iterable[Any], epochs: int = 1, steps: int | None = None) -> list[dict[str, float]]:
        """Train for `epochs` passes over the data in all, or until step `steps` in all; the history of metrics.

        After `resume` it goes on where the checkpoint was written: earlier batches of the epoch are passed over.

        Raises:
            ArgumentError: the data are no iterable, or yield nothing; a batch does not fit the loss function; `epochs`
                or `steps` is no count; the folder has checkpoints of later steps, which are another run's.
        """
        epochs, steps = to_python_numbers((epochs, steps))
        for name, count in (("epochs", epochs), ("steps", 0 if steps is None else steps)):
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ArgumentError(f"{name} is {count!r}", location=user_location(), expected="an integer from 0 on")
        if not hasattr(data, "__iter__"):
            raise ArgumentError(
                "the data cannot be iterated", location=user_location(), expected="an iterable of batches",
                received=type(data).__name__,
            )  # fmt: skip
        self._refuse_later_checkpoints()
        total = self._count_steps(data, epochs, steps)
        with self._open_progress(total) as show:
            while (self.epoch < epochs or steps is not None) and (steps is None or self.step < steps):
                before = self.step, self.batch  # a checkpoint may lie at the end of an epoch
                self._run_epoch(data, steps, show)
                if (self.step, self.batch) == before and self.epoch > 0:
                    break
        if self.checkpoint is not None:
            self.save_checkpoint()
        for log in self._logs:
            log.close()
        return self.history

    def _count_steps(self, data: Any, epochs: int, steps: int | None) -> int | None:
        if steps is not None:
            return steps
        return len(data) * epochs if hasattr(data, "__len__") else None

    def _run_epoch(self, data: Any, steps: int | None, show: Callable[[dict[str, float]], None]) -> None:
        if hasattr(data, "set_epoch"):
            data.set_epoch(self.epoch)
        done, seen = self.batch, 0
        for seen, raw in enumerate(data, 1):
            if seen <= done:
                continue  # a batch of before the checkpoint
            if steps is not None and self.step >= steps:
                return
            batch = read_batch(raw)
            start = time.perf_counter()
            row = self._run_step(batch)
            self.step, self.batch = self.step + 1, seen
            rate = count_examples(batch) / max(time.perf_counter() - start, 1e-9)
            self._record({"step": self.step, "epoch": self.epoch, **row, "examples/s": rate}, show)
        if not seen:
            raise ArgumentError(
                "the data yield no batch", location=user_location(), expected="an iterable for each epoch",
                suggestion="an iterator can be passed over once: give a list, or an object with __iter__",
            )  # fmt: skip
        self.epoch, self.batch = self.epoch + 1, 0

    def _record(self, row: dict[str, Any], show: Callable[[dict[str, float]], None]) -> None:
        self.history.append(row)
        for log in self._logs:
            log.write(row)
        show(row)
        if self.checkpoint is not None and self.checkpoint_every and self.step % self.checkpoint_every == 0:
            self.save_checkpoint()

    def _open_progress(self, total: int | None) -> _ProgressBar:
        return _ProgressBar(total, self.step, self._shows)

    # Checkpoints.

    def save_checkpoint(self) -> Path:
        """Save the model, the optimizer's state, the place in the data and the random state, atomically."""
        if self.checkpoint is None:
            raise ArgumentError("the loop has no folder for checkpoints", location=user_location())
        self.checkpoint.mkdir(parents=True, exist_ok=True)
        seed, first, count, _ = get_random_state().save()
        loop = {"step": self.step, "epoch": self.epoch, "batch": self.batch, "seed": seed, "draws": first + count}
        loop |= {"scale": self.scaler.factor, "good": self.scaler._good_steps} if self.scaler else {}
        held = {"loop": loop, "model": self.model, "optimizer": self.state}
        made = save(held, self.checkpoint / f"step-{self.step:08d}.safetensors")
        for old in self._list_checkpoints()[: -self.keep]:
            old.unlink()
        return made

    def _refuse_later_checkpoints(self) -> None:
        """Refuse a folder in which `resume` would find another run, and which would keep its files instead of ours."""
        later = [file for file in self._list_checkpoints() if file.stem > f"step-{self.step:08d}"]
        if later:
            raise ArgumentError(
                f"the folder {self.checkpoint} has a checkpoint of step {int(later[-1].stem.removeprefix('step-'))}, "
                f"and this run is at step {self.step}", location=user_location(),
                suggestion="loop.resume() goes on from it; a new run takes an empty folder",
            )  # fmt: skip

    def _list_checkpoints(self) -> list[Path]:
        return sorted(self.checkpoint.glob("step-*.safetensors")) if self.checkpoint is not None else []

    def resume(self, path: str | Path | None = None) -> int:
        """Go on from a checkpoint: a file, or the newest of the loop's folder; the number of its step.

        Nothing changes unless all of it fits.

        Raises:
            ArgumentError: neither the loop nor the call names a place.
            FileError: there is no checkpoint, or it is truncated.
            StateDictError: it is that of another model or optimizer; it names the entries.
        """
        listed = self._list_checkpoints()
        if path is None and self.checkpoint is None:
            raise ArgumentError(
                "the loop has no folder for checkpoints", location=user_location(), expected="a folder or a file",
                suggestion="ts.train.Loop(..., checkpoint=folder), or loop.resume(path)",
            )  # fmt: skip
        if path is None and not listed:
            raise FileError(
                f"there is no checkpoint in {self.checkpoint}", location=user_location(),
                expected="step-N.safetensors, written by a loop",
            )  # fmt: skip
        scaler = {"scale": 0.0, "good": 0} if self.scaler else {}
        loop = {"step": 0, "epoch": 0, "batch": 0, "seed": 0, "draws": 0, **scaler}
        like = {"loop": loop, "model": self.model, "optimizer": self.state}
        found = load(listed[-1] if path is None else path, like=like)
        self.model, self.state, loop = found["model"], found["optimizer"], found["loop"]
        self._owns = False
        self.step, self.epoch, self.batch = loop["step"], loop["epoch"], loop["batch"]
        get_random_state().restart(loop["seed"], loop["draws"])
        if self.scaler:
            self.scaler.factor, self.scaler._good_steps = loop["scale"], loop["good"]
        for log in self._logs:
            if isinstance(log, CsvLog):
                log.keep_until(self.step)
        return self.step


def _unscale(grads: Any, scale: Any) -> Any:
    """The gradients divided by the scale, in f32 or wider."""
    leaves, tree = flatten(grads, empty=True)
    return tree.build(iter([cast(g, dtype=wide_type(g)) / scale for _, g in leaves]))


def _copy(tree: Any) -> Any:
    """A tree with memory of its own."""
    return map_leaves(
        lambda x: wrap_array(np.array(x.numpy()), x.type).to(x.device) if isinstance(x, Tensor) else x, tree
    )


def _undo_unless(good: Tensor, after: Module, before: Module) -> Module:
    """The model after a forward pass; where the step was not good, what the pass renewed in it is that of before.

    These are buffers, such as the statistics of batch norm, and tables whose rows `max_norm` limits.
    """
    leaves, tree = flatten(after, empty=True)
    held = dict(flatten(before, empty=True)[0])
    found = []
    for (path, x), renewed in zip(leaves, tree.list_renewed(), strict=True):
        old = held.get(path, x) if renewed else x
        found.append(x if old is x else where(good, x, old))
    return tree.build(iter(found))


class _ProgressBar:
    """The progress of a run on standard error: steps, loss, examples per second and the time that is left."""

    def __init__(self, total: int | None, start: int, shown: bool) -> None:
        columns = (
            BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4g}"),
            TextColumn("{task.fields[rate]:,.0f} examples/s"), TimeRemainingColumn(),
        )  # fmt: skip
        self._bar = Progress(*columns, console=Console(stderr=True), disable=not shown)
        self._task = self._bar.add_task("train", total=total, completed=start, loss=math.nan, rate=0.0)

    def __enter__(self) -> Callable[[Mapping[str, float]], None]:
        self._bar.start()
        return lambda row: self._bar.update(self._task, advance=1, loss=row["loss"], rate=row["examples/s"])

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()


def evaluate(function: Callable[..., Any], model: Module, data: Iterable[Any], target: str | None = None) -> Any:
    """The mean over all examples of what `function(model, *batch)` gives: a scalar, or a dict of scalars.

    The model is in evaluation mode meanwhile.

    >>> from tessera.nn.containers import Lambda
    >>> evaluate(lambda model, x: model(x).mean(), Lambda(lambda x: x * 2.0), [Tensor([1.0, 2.0]), Tensor([3.0])])
    4.0

    Raises:
        ArgumentError: the data yield no batch.
    """
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    compiled = jit(lambda model, args, named: function(model, *args, **named), target=target)
    sums: dict[str, float] = {}
    count = 0
    try:
        for raw in data:
            batch = read_batch(raw)
            check_batch(function, model, *batch)
            found = compiled(model, *batch)
            weight = count_examples(batch)
            named = found if isinstance(found, Mapping) else {"": found}
            sums = {name: sums.get(name, 0.0) + float(as_tensor(v).item()) * weight for name, v in named.items()}
            count += weight
    finally:
        for each, mode in modes:
            each.training = mode
    if not count:
        raise ArgumentError("the data yield no batch", location=user_location())
    means = {name: total / count for name, total in sums.items()}
    return means[""] if list(means) == [""] else means
