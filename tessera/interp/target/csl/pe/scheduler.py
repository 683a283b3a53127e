"""PE scheduler: starts, suspends and resumes the tasks and microthreads of one PE, and selects its next task."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import GeneratorType
from typing import Any, NoReturn

from tessera.core.errors import ArgumentError, Location, TesseraError
from tessera.interp.target.csl.cost_model import COSTS
from tessera.interp.target.csl.fabric.queues import InputQueue
from tessera.interp.target.csl.fabric.routing import CONTROL_FLAG, WORD_MASK
from tessera.interp.target.csl.pe.dsd_operations import Microthread
from tessera.interp.target.csl.pe.pe_state import PeState, PeThread, TaskCall, WaitCondition, unpack_arguments
from tessera.interp.target.csl.pe.program import BOOT_FUNCTION
from tessera.interp.target.csl.sema import types as t
from tessera.interp.target.csl.sema.compilation_unit import BoundTask
from tessera.interp.target.csl.text.diagnostics import CslFault

MAX_OVERTAKEN = 2  # times that the first ready task may overtake another one
NO_TASK_ID = 31  # the id in a control wavelet that names no task
# What generated code raises for a wrong program; any other exception is an error of the simulator.
_PROGRAM_FAULTS = (IndexError, ArithmeticError, TypeError, AttributeError, ValueError, RecursionError)
_WAIT_TEXTS = {"in": "a wavelet on color", "out": "room to send on color", "fifo": "FIFO", "state": "state"}


_NO_LINE = Location()

# A ready task: its id or color, and a function with its argument that takes it off its queue.
ReadyTask = tuple[int, Callable[[PeState, Any], TaskCall], Any]


# Microthreads: generators that run beside the tasks.


def notify(pe: PeState, kind: str, key: Any) -> None:
    """Resume the threads that wait for a condition."""
    if pe.waiters:
        resume_waiting(pe, pe.waiters.pop((kind, id(key) if kind == "fifo" else key), None))


def resume_waiting(pe: PeState, threads: list[PeThread] | None) -> None:
    """Resume threads in the present cycle."""
    if threads:
        events = pe.events
        for thread in threads:
            events.at(events.now, thread.again)


def resume_at_once(pe: PeState, threads: list[PeThread] | None) -> None:
    """Resume threads from an event of the fabric, which nothing follows.

    With a seed the number of events decides its choices. On WSE-2 a queue that sends words ahead of their time has to
    know which events their own cycle added.
    """
    if threads:
        if pe.wide and pe.events.random is None:
            for thread in threads:
                thread.again()
        else:
            resume_waiting(pe, threads)


def spawn(
    pe: PeState, body: Microthread, on_done: Callable[[], None] | None = None, name: str = "thread", setup: int = 0
) -> None:
    """Start a microthread that no line of the program stands for, `setup` cycles after the PE has come to it."""
    begin(pe, name, body, on_done, _NO_LINE, setup)


def begin(
    pe: PeState, name: str, body: Microthread, done: Callable[[], None] | None, loc: Location, setup: int = 0
) -> None:
    """Start a microthread at the present cycle of the PE; a `setup` begins when the present task has ended."""
    thread = PeThread(name, body, done, False, loc)
    pe.threads[thread] = None
    thread.again = again = partial(resume, pe, thread)
    events = pe.events
    if setup and pe.front is _RUNNING and events.random is None:
        pe.beginning.append((setup, again))  # its first cycle is known when the task ends
        return
    first = (lambda: events.at(pe.clock + setup, again)) if setup else again
    events.at(pe.clock if pe.clock > events.now else events.now, first)


def resume(pe: PeState, thread: PeThread) -> None:
    """Resume a generator until it waits or ends."""
    thread.wait = None
    if pe.pending:
        settle(pe)
    events, body, front = pe.events, thread.body, thread.front
    while True:
        if front and pe.clock < events.now:
            pe.clock = events.now
        try:
            wait: Any = next(body, thread)
        except Exception as error:
            raise_fault(pe, error, thread)
        if wait is thread:
            break
        if type(wait) is WaitCondition:
            thread.wait = wait
            key: Any = ("fifo", id(wait[1])) if wait[0] == "fifo" else wait
            waiters = pe.waiters
            if key in waiters:
                waiters[key].append(thread)
            else:
                waiters[key] = [thread]
            return
        if wait is not None and wait > events.now:
            events.at(wait, thread.again)
            return
    pe.threads.pop(thread, None)
    if thread.done is not None:
        thread.done()


def settle(pe: PeState) -> None:
    """Execute the deferred memory steps of recorded tasks."""
    if pe.pending and pe.lockstep_group is not None:
        pe.lockstep_group.settle(pe)


# Tasks: activation, selection, execution.


def boot(pe: PeState) -> None:
    """Run what comptime blocks of the program scheduled: DSR loads and activated tasks."""
    pe.space[BOOT_FUNCTION]()
    for number in pe.active:
        _find_local_task(pe, number)
    wake(pe)


def _find_local_task(pe: PeState, number: int) -> BoundTask:
    if number not in pe.local:
        raise CslFault(f"local task ID {number} is activated but no task is bound to it")
    return pe.local[number]


def activate(pe: PeState, number: int) -> None:
    """`@activate`."""
    if number not in pe.local:
        _find_local_task(pe, number)
    pe.active[number] = None
    wake(pe)


def block(pe: PeState, number: int) -> None:
    """`@block`."""
    pe.blocked.add(number)


def unblock(pe: PeState, number: int) -> None:
    """`@unblock`."""
    pe.blocked.discard(number)
    wake(pe)


def start(pe: PeState, function: Any, args: tuple[Any, ...] = ()) -> None:
    """Queue a call of an exported function, as a launch from the host does.

    Raises:
        ArgumentError: the number of arguments is wrong.
    """
    if len(args) != len(function.params):
        raise ArgumentError(
            f"'{function.name}' is launched with {len(args)} arguments", expected=str(len(function.params))
        )
    converted = tuple(_convert_argument(p, a) for p, a in zip(function.params, args, strict=True))
    pe.calls.append((function.name, function.run, converted))
    wake(pe)


def _convert_argument(type_: t.CslType, value: Any) -> Any:
    if isinstance(type_, t.CslFloat):
        return type_.dtype.type(value)
    return type_.wrap(int(value)) if isinstance(type_, t.CslInt) else value


def receive_wavelet(pe: PeState, color: int) -> None:
    """Handle the arrival of a wavelet in the input queue of a color.

    Plain words of a color without a data task start no task. With a seed they are looked at nevertheless: the number of
    events decides its choices.
    """
    starts, events = color in pe.data or pe.fabric.node.inputs[color].controls, pe.events
    if starts or events.random is not None:
        pe.ready_colors[color] = None
    waiting = pe.waiters.pop(("in", color), None) if pe.waiters else None
    if waiting:
        resume_at_once(pe, waiting)
        if not starts:
            return  # words that an operation reads start no task
    wake(pe)


def resume_senders(pe: PeState, color: int) -> None:
    """Handle free room in the output queue of a color."""
    notify(pe, "out", color)


def wake(pe: PeState) -> None:
    """Schedule a task selection for the first cycle at which the PE is free, if something may be ready."""
    if pe.front is not None:
        return
    events, when = pe.events, pe.clock
    if not (pe.active or pe.ready_colors or pe.calls):
        if when > events.end:
            events.end = when
        return
    if when < events.now:
        when = events.now
    if pe.wake_time is None or pe.wake_time > when:
        pe.wake_time = when
        events.at(when, pe.dispatch)


def dispatch(pe: PeState) -> None:
    """Select and run a task, if the PE is free."""
    pe.wake_time = None
    if pe.front is not None:
        return
    now, active = pe.events.now, pe.active
    if now < pe.clock:
        wake(pe)
        return
    if len(active) != 1 or pe.ready_colors or pe.calls:
        call = _select_task(pe)
        if call is not None:
            _run_task(pe, *call)
        return
    (number,) = active  # the only ready task, as `_take_active_task`
    if number not in pe.blocked:
        active.clear()
        task, pe.clock = pe.local[number], now + COSTS.activation
        _run_task(pe, task.title, pe.space[task.name], ())


def _select_task(pe: PeState) -> TaskCall | None:
    """Take the next ready task off its queue."""
    active, blocked = pe.active, pe.blocked
    ready: list[ReadyTask] = []
    if pe.ready_colors:
        node = pe.fabric.node
        for color in tuple(pe.ready_colors):
            task = _find_wavelet_task(pe, color, node.inputs.get(color) or node.get_input(color))
            if task is not None:
                ready.append(task)
    for number in active:
        if number not in blocked:
            ready.append((number, _take_active_task, number))
    if pe.calls:
        ready.append((-1, _take_host_call, None))
    if not ready:
        return None
    _, take, what = ready[0] if len(ready) == 1 else _select_ready(pe, ready)
    return take(pe, what)


def _select_ready(pe: PeState, ready: list[ReadyTask]) -> ReadyTask:
    """The one of several ready tasks that runs: of high priority, then by the order of its kind, or at random."""
    first = ready
    if pe.high_priority:
        first = [one for one in ready if one[0] in pe.high_priority] or ready
    return _select_fairly(pe, first) if pe.events.random is None else pe.events.random.choice(first)


def _select_fairly(pe: PeState, ready: list[ReadyTask]) -> ReadyTask:
    """The first ready task, unless it overtook another one `MAX_OVERTAKEN` times: then that one.

    The vendor does not document the order. A fixed one would let tasks starve another; a public program that relays
    wavelets through small buffers loses words unless its sending task has its turn between a few arrivals, and one of
    the vendor's indexes out of bounds if the turns come after each of them.
    """
    overtaken, chosen = pe.overtaken, ready[0]
    for other in ready:
        number = other[0]
        if number == chosen[0]:
            continue
        count = overtaken.get(number, 0) + 1
        if count > MAX_OVERTAKEN:
            chosen, count = other, 0
        overtaken[number] = count
    overtaken.pop(chosen[0], None)
    return chosen


def _take_active_task(pe: PeState, number: int) -> TaskCall:
    del pe.active[number]
    now, task = pe.events.now, pe.local[number]
    pe.clock = (now if now > pe.clock else pe.clock) + COSTS.activation
    return task.title, pe.space[task.name], ()


def _take_host_call(pe: PeState, _: None) -> TaskCall:
    return pe.calls.popleft()


def _make_call(pe: PeState, task: BoundTask, args: tuple[Any, ...]) -> TaskCall:
    return task.title, pe.space[task.name], args


def _find_wavelet_task(pe: PeState, color: int, queue: InputQueue) -> ReadyTask | None:
    """The task that the first wavelet of an input queue starts. Its priority is that of the queue on WSE-3."""
    runs = queue.words.runs
    if not runs or runs[0][0] > pe.events.now:  # none has arrived
        del pe.ready_colors[color]
        return None
    head = runs[0][1][0]
    if head & CONTROL_FLAG:
        return _find_control_task(pe, color, head & WORD_MASK)
    task = pe.data.get(color)
    if task is None or task.number in pe.blocked or (pe.busy and ("in", color) in pe.busy):
        return None
    return pe.queue_numbers.get(color, color), _take_data_task, (queue, task)


def _take_data_task(pe: PeState, found: tuple[InputQueue, BoundTask]) -> TaskCall:
    queue, task = found
    now = pe.events.now
    word = queue.take_first(now)
    if pe.clock < now:
        pe.clock = now + COSTS.wavelet_start[pe.wide]
    return task.title, pe.space[task.name], unpack_arguments(task.params, word)


def _find_control_task(pe: PeState, color: int, word: int) -> ReadyTask | None:
    if color in pe.control_ended_colors:
        return None
    entry = word >> 16 & 0x3F
    task = pe.control.get(entry) or (None if pe.wide else _find_shared_task(pe, entry))
    if entry in pe.blocked or _is_queue_blocked(pe, color):
        return None
    if task is None:
        pe.fabric.pop_control(color)
        if entry != NO_TASK_ID:
            what = f"control wavelet on color {color} names task ID {entry}, to which no task is bound"
            raise place_error(pe, CslFault(what), None, None)
        wake(pe)
        return None

    return pe.queue_numbers.get(color, color), _take_control_task, (color, task, word)


def _take_control_task(pe: PeState, found: tuple[int, BoundTask, int]) -> TaskCall:
    color, task, word = found
    pe.fabric.pop_control(color)
    return _make_call(pe, task, unpack_arguments(task.params, word & 0xFFFF))


def _find_shared_task(pe: PeState, number: int) -> BoundTask | None:
    """The task of another kind with an id, which a control wavelet also starts on WSE-2: all kinds share one table."""
    return pe.data.get(number) or pe.local.get(number)


def _is_queue_blocked(pe: PeState, color: int) -> bool:
    if not pe.wide:
        return color in pe.blocked
    return any(q in pe.blocked for q, c in pe.in_colors.items() if c == color)


def _run_task(pe: PeState, name: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    begin_cycle, clock, group = pe.events.now, pe.clock, pe.lockstep_group
    if begin_cycle > clock:
        clock = begin_cycle
    # The last word of the task before is still on its way to the router.
    pe.clock = clock + (COSTS.overlapped_start if clock == pe.operation_end else COSTS.task_start)[pe.wide]
    match = None if group is None else group.record(pe, function, args)
    pe.front = _RUNNING  # what the task makes ready waits for its end
    if match is not None:
        _replay_record(pe, *match)
        _end_task(pe, name, begin_cycle)
        return
    if pe.pending:
        settle(pe)
    try:
        body = function(*args)
    except Exception as error:
        pe.front = None
        raise_fault(pe, error)
    if type(body) is GeneratorType:
        thread = pe.front = PeThread(name, body, partial(_end_task, pe, name, begin_cycle), True, Location())
        thread.again = partial(resume, pe, thread)
        resume(pe, thread)
    else:
        _end_task(pe, name, begin_cycle)


_RUNNING = PeThread("a task", (_ for _ in ()), None, True, Location())  # stands for a task that is no generator


def _end_task(pe: PeState, name: str, begin_cycle: int) -> None:
    pe.front = None
    if pe.trace is not None:
        pe.trace(name, begin_cycle, pe.clock)
    if pe.beginning:
        for setup, again in pe.beginning:
            pe.events.at(pe.clock + setup, again)
        pe.beginning.clear()
    if pe.active or pe.ready_colors or pe.calls:
        wake(pe)
    elif pe.clock > pe.events.end:
        pe.events.end = pe.clock


def _replay_record(
    pe: PeState, record: Any, values: list[Any], inputs: tuple[Any, ...], results: list[tuple[str, Any]]
) -> None:
    """Replay the record of a task: its effects at once, its memory steps deferred."""
    pe.pending.append((record.work, inputs))
    pe.space.update(results)
    for cycles, call, args, line in record.effects:
        pe.clock += cycles
        try:
            call(pe, *args(pe, values))
        except Exception as error:
            pe.front = None
            raise_fault(pe, error, line=line)
    pe.clock += record.cycles


# Faults and reports.


def raise_fault(pe: PeState, error: Exception, thread: PeThread | None = None, line: int | None = None) -> NoReturn:
    """Raise an error of generated code or of a library as a fault with its CSL location, PE and cycle."""
    line = _find_generated_line(pe, error) if line is None else line
    if isinstance(error, TesseraError):
        raise place_error(pe, error, line, thread)
    raise place_error(pe, CslFault(_describe_error(error)), line, thread) from error


def _find_generated_line(pe: PeState, error: BaseException) -> int | None:
    """The innermost line of this program's Python in the traceback of an error."""
    line, name = None, pe.program.code.co_filename
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def place_error(pe: PeState, error: TesseraError, line: int | None, thread: PeThread | None) -> TesseraError:
    """Add the CSL location, the PE and the cycle to an error."""
    if error.location is None and line is not None:
        error.location = pe.program.place(line)
    elif error.location is None and thread is not None and thread.loc.line:
        error.location = thread.loc
    if not error.message.startswith("PE ("):
        cycle = "" if "cycle" in error.message else f" (cycle {max(pe.clock, pe.events.now)})"
        error.message = f"PE ({pe.x}, {pe.y}): {error.message}{cycle}"
    return error


def _describe_error(error: Exception) -> str:
    if not isinstance(error, _PROGRAM_FAULTS):
        return f"internal error of the simulator: {type(error).__name__}: {error}"
    if isinstance(error, ZeroDivisionError):
        return "division by zero"
    if isinstance(error, TypeError):
        return f"use of an uninitialized pointer or descriptor ({error})"
    if isinstance(error, RecursionError):
        return "the calls of functions nest too deeply"
    return str(error) or type(error).__name__


def is_idle(pe: PeState) -> bool:
    """Whether the PE has no running, queued or ready task."""
    return pe.front is None and not pe.threads and not pe.calls and not (set(pe.active) - pe.blocked)


def describe_waits(pe: PeState) -> list[str]:
    """The waiting threads and blocked tasks of the PE, one line each."""
    threads = ([pe.front] if pe.front else []) + list(pe.threads)
    lines = [f"{r.name}{f' ({r.loc})' if r.loc.line else ''} waits for {_describe_wait(r.wait)}" for r in threads]
    blocked = [pe.local[n].title for n in pe.active if n in pe.blocked]
    return lines + [f"task '{name}' is active but blocked" for name in blocked]


def _describe_wait(wait: Any) -> str:
    if not isinstance(wait, WaitCondition):
        return "its next cycle"
    return f"{_WAIT_TEXTS.get(wait.kind, wait.kind)} {'' if wait.kind == 'fifo' else wait.key}".rstrip()
