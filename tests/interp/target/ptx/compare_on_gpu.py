"""Every launch of this folder's tests on a GPU, compared with the interpreter bit by bit.

    python compare_on_gpu.py record CASES [pytest options]    run the tests and keep each launch that succeeds
    python compare_on_gpu.py assemble CASES                   check the texts with ptxas
    python compare_on_gpu.py replay CASES [SKIP ...]          run them on the GPU: needs NumPy and libcuda alone

SKIP are parts of names of tests to leave out; `--keep=FILE` keeps what the GPU left where it differs. Launches run in a
process of their own, and after one that fails (or gives no answer for a minute) in a new one.

What differs is printed with its first elements. The stated exceptions stand apart: approximate instructions within
their documented error, the order of atomics, sums of tensor cores, the bytes of tensor maps, and products that ptxas
fused with sums (see ptx_differences.py).
"""

import hashlib
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
from ptx_differences import BFLOAT, differing, reasons, report
from ptx_gpu import Gpu

HERE = Path(__file__).parent
PATIENCE = 60  # seconds
SAME, DIFFERS, FAILED = "the same bits", "differ without an excuse", "failed to run"


def record(path, options):
    """Run the tests with launches that keep what went in and what came out."""
    import pytest

    sys.path[:0] = [str(HERE), str(HERE.parents[3])]
    from tessera.interp.target.ptx import PtxModule, TensorMap
    from tessera.interp.target.ptx.machine.memory import GlobalArena
    from tessera.interp.target.ptx.module import ArgumentBuffers, encode_parameter

    cases, seen, plain, texts = [], set(), PtxModule.launch, {}
    make = PtxModule.__init__

    def init(self, text, file="<ptx>"):
        make(self, text, file)
        texts[id(self)] = (self, text)  # kept alive, so that ids stay unique

    def launch(self, entry, grid=1, block=1, args=(), shared=0, debug=False, cluster=None, cooperative=False):
        arena = GlobalArena()
        buffers = ArgumentBuffers(args, arena)
        arena.freeze()
        buffers.copy_in()
        before = arena.flat.raw.copy()
        plain(self, entry, grid, block, args, shared, debug, cluster, cooperative)
        buffers.copy_in()
        formal = self.entries[entry].params
        params = [_kept(v, a, buffers, TensorMap, encode_parameter) for v, a in zip(formal, args, strict=True)]
        case = {
            "test": os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0].split("::")[-1],
            "module": id(self), "text": texts[id(self)][1], "entry": entry, "grid": grid, "block": block,
            "cluster": cluster, "cooperative": cooperative, "shared": shared, "params": params,
            "before": before, "after": arena.flat.raw.copy(),
            "types": [(buffers.offset(a), a.nbytes, _kind(a)) for a in buffers.arrays],
        }  # fmt: skip
        key = hashlib.sha1(pickle.dumps({k: v for k, v in case.items() if k not in ("test", "module")})).digest()
        if key not in seen:
            seen.add(key)
            cases.append(case)

    PtxModule.__init__, PtxModule.launch = init, launch
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *(options or [str(HERE)])])
    Path(path).write_bytes(pickle.dumps(cases))
    print(f"{len(cases)} launches kept")


def _kind(array):
    """NumPy's own name of a type; the others, by their bits."""
    if array.dtype.isbuiltin == 1 and array.dtype.kind in "fiu":
        return array.dtype.str
    if array.dtype == BFLOAT:
        return "bfloat16"
    return f"<u{array.dtype.itemsize}" if array.dtype.itemsize in (1, 2, 4, 8) else "|u1"


def _kept(v, a, buffers, tensor_map, parameter):
    """A parameter without its address."""
    if isinstance(a, np.ndarray):
        return ("pointer", buffers.offset(a))
    if isinstance(a, tensor_map):
        shape = a.shape or a.array.shape
        strides = a.strides or tuple(a.array.strides[:-1])
        steps = a.element_strides or (1,) * len(shape)
        code = a.encode(0)[8 + 8 + 20 + 32 + 10 + 5 + 1]  # the driver's number of the element type
        inner_first = [tuple(reversed(x)) for x in (shape, strides, a.box, steps)]
        return ("map", buffers.offset(a.array), code, *inner_first, {0: 0, 32: 1, 64: 2, 128: 3}[a.swizzle], a.nan_fill)
    return ("bytes", parameter(v, a, buffers))


def assemble(path):
    """Whether ptxas takes each text."""
    texts, bad = {c["text"]: c["test"] for c in pickle.loads(Path(path).read_bytes())}, 0
    for text, test in texts.items():
        arch = "sm_90a" if "sm_90a" in text else "sm_90" if "sm_90" in text else "sm_80"
        command = ["ptxas", f"-arch={arch}", "/dev/stdin", "-o", "/dev/null"]
        done = subprocess.run(command, input=text, text=True, capture_output=True)
        if done.returncode:
            bad += 1
            print(test, done.stderr.strip().splitlines()[0])
    print(f"{len(texts)} texts, {bad} not taken")
    return bad


def worker(cases, first, pipe):
    """Run the cases from one on, until one fails: that may have destroyed the context for good."""
    gpu = Gpu()
    for case in cases[first:]:
        try:
            pipe.send(gpu.run(case))
        except RuntimeError as error:
            pipe.send(str(error))
            return


def outcomes(cases):
    """For each case the arena that the GPU left, or what went wrong; a process goes on where the last one ended."""
    context, done = multiprocessing.get_context("fork"), 0
    while done < len(cases):
        pipe, end = context.Pipe(duplex=False)
        child = context.Process(target=worker, args=(cases, done, end), daemon=True)
        child.start()
        end.close()
        for got in answers(pipe, len(cases) - done):
            yield got
            done += 1
        child.kill()
        child.join()


def answers(pipe, many):
    """What a process sends, to its first failure; silence is one too."""
    for _ in range(many):
        try:
            got = pipe.recv() if pipe.poll(PATIENCE) else f"no answer in {PATIENCE} seconds"
        except EOFError:
            got = "the process ended"
        yield got
        if isinstance(got, str):
            return


def replay(path, options):
    """Run all, print what differs and the table; 1 where a launch failed or differs without an excuse."""
    keep = next((o.removeprefix("--keep=") for o in options if o.startswith("--keep=")), None)
    skipped, table, kept = [o for o in options if not o.startswith("--")], Counter(), {}
    cases = [c for c in pickle.loads(Path(path).read_bytes()) if not any(s in c["test"] for s in skipped)]
    for i, (case, got) in enumerate(zip(cases, outcomes(cases), strict=True)):
        row, lines = judged(case, got)
        table[row] += 1
        if row != SAME:
            print(lines, flush=True)
            kept[i] = (case, got)
    if keep:
        Path(keep).write_bytes(pickle.dumps(kept))
    print(f"{len(cases)} launches")
    for row, many in table.most_common():
        print(f"{many:6} {row}")
    return int(bool(table[FAILED] or table[DIFFERS]))


def judged(case, got):
    """The row of the table that a launch belongs to, and what to print."""
    if isinstance(got, str):
        return FAILED, f"FAILED {case['test']} {case['entry']}: {got}"
    if not (elements := differing(case, got)):
        return SAME, ""
    why = reasons(case, elements)
    return f"excused: {', '.join(why)}" if why else DIFFERS, report(case, elements, why)


def main():
    """One of the three actions."""
    if len(sys.argv) < 3 or sys.argv[1] not in ("record", "assemble", "replay"):
        sys.exit(__doc__)
    action, path, *rest = sys.argv[1:]
    actions = {"record": lambda: record(path, rest), "assemble": lambda: assemble(path)}
    return actions.get(action, lambda: replay(path, rest))()


if __name__ == "__main__":
    sys.exit(main())
