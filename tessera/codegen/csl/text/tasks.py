"""Tasks: the program's continuation after asynchronous operations, completion tasks, and task IDs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tessera.codegen.csl.text.context import MAX_TASK_EVENTS, CslContext, TaskFunction

# Local task IDs that exist on both architectures and that the memcpy library does not use. On WSE-2 a wavelet of a
# color activates the data task with the ID of that color.
LOCAL_TASK_IDS = (*range(8, 21), *range(24, 27))


def assign_task_ids(tasks: Sequence[TaskFunction], colors: Collection[int]) -> dict[str, int]:
    """IDs of tasks, by name, none equal to a color of the program. Tasks beyond the available IDs get none."""
    free = (number for number in LOCAL_TASK_IDS if number not in colors)
    return {task.name: number for task, number in zip(tasks, free, strict=False)}


def format_task_ids(numbers: Mapping[str, int]) -> str:
    """The declarations of task IDs."""
    return "".join(f"const {n}_id: local_task_id = @get_local_task_id({number});\n" for n, number in numbers.items())


def get_pending_task(ctx: CslContext) -> TaskFunction:
    """The task that continues when the asynchronous operations in progress are complete."""
    if ctx.pending_task is None:
        ctx.pending_task = TaskFunction(f"after{len(ctx.task_functions)}")
    return ctx.pending_task


def add_completion_task(ctx: CslContext, along: str) -> str:
    """Add a task that waits for two events and then signals one event to the pending task; returns its name."""
    task = get_pending_task(ctx)
    return add_task(ctx, f"{task.name}_{along}", [f"@{task.add_event()}({task.name}_id);"], MAX_TASK_EVENTS)


def add_task(ctx: CslContext, name: str, statements: Sequence[str], awaits: int = 1) -> str:
    """Add a task; returns its name."""
    ctx.completion_tasks.setdefault(name, TaskFunction(name, [f"  {text}" for text in statements], awaits))
    return name


def end_task(ctx: CslContext) -> None:
    """End the present function; the pending task continues when the asynchronous operations are complete."""
    assert ctx.pending_task is not None and ctx.depth == 1
    ctx.task_functions.append(ctx.pending_task)
    ctx.pending_task, ctx.comment = None, ""
