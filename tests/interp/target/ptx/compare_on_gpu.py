"""Every launch of this folder's tests on a GPU, compared with the interpreter bit by bit.

    python compare_on_gpu.py record CASES [pytest options]    run the tests and keep each launch that succeeds
    python compare_on_gpu.py assemble CASES                   check the texts with ptxas
    python compare_on_gpu.py replay CASES [-v] [SKIP ...]     run them on the GPU: needs NumPy and libcuda alone

SKIP are parts of names of tests to leave out. A launch that takes a minute ends the process; -v names each beforehand.

Approximate instructions, the order of atomics and the sums of tensor cores are the stated exceptions: what differs is
listed with its largest relative difference, so that these can be told from the rest.
"""

import ctypes
import hashlib
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
PATIENCE = 60  # seconds
SHARED_LIMIT = 48 << 10  # beyond this a kernel must ask


def record(path, options):
    """Run the tests with launches that keep what went in and what came out."""
    import pytest

    sys.path[:0] = [str(HERE), str(HERE.parents[3])]
    from tessera.interp.target.ptx import Module, TensorMap
    from tessera.interp.target.ptx.arguments import Buffers, parameter
    from tessera.interp.target.ptx.memory import Arena

    cases, seen, plain, texts = [], set(), Module.launch, {}
    make = Module.__init__

    def init(self, text, file="<ptx>"):
        make(self, text, file)
        texts[id(self)] = (self, text)  # kept alive, so that ids stay unique

    def launch(self, entry, grid=1, block=1, args=(), shared=0, debug=False, cluster=None):
        arena = Arena()
        buffers = Buffers(args, arena)
        arena.freeze()
        buffers.copy_in()
        before = arena.flat.raw.copy()
        plain(self, entry, grid, block, args, shared, debug, cluster)
        buffers.copy_in()
        formal = self.entries[entry].params
        params = [_kept(v, a, buffers, TensorMap, parameter) for v, a in zip(formal, args, strict=True)]
        case = {
            "test": os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0].split("::")[-1],
            "module": id(self), "text": texts[id(self)][1], "entry": entry, "grid": grid, "block": block,
            "cluster": cluster, "shared": shared, "params": params, "before": before, "after": arena.flat.raw.copy(),
            "types": [(buffers.offset(a), a.nbytes, _kind(a)) for a in buffers.arrays],
        }  # fmt: skip
        key = hashlib.sha1(pickle.dumps({k: v for k, v in case.items() if k not in ("test", "module")})).digest()
        if key not in seen:
            seen.add(key)
            cases.append(case)

    Module.__init__, Module.launch = init, launch
    pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *(options or [str(HERE)])])
    Path(path).write_bytes(pickle.dumps(cases))
    print(f"{len(cases)} launches kept")


def _kind(array):
    return array.dtype.str if array.dtype.kind in "fiu" else f"<u{array.dtype.itemsize}"


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


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: a cluster's extent."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [("extents", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute))]
    _fields_ += [("many", ctypes.c_uint)]


class Gpu:
    """The driver's calls that a launch takes."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.check("cuInit", 0)
        self.context, self.modules = ctypes.c_void_p(), {}
        self.check("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.check("cuCtxSetCurrent", self.context)

    def check(self, name, *args):
        """Call the driver; raise its error by name."""
        if code := getattr(self.cuda, name)(*args):
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'?').decode()}")

    def reset(self):
        """A new context after an error that ended the last."""
        self.modules.clear()
        self.cuda.cuDevicePrimaryCtxReset_v2(0)
        self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), 0)
        self.cuda.cuCtxSetCurrent(self.context)

    def function(self, case):
        """The entry, from a module loaded once."""
        if case["module"] not in self.modules:
            handle = ctypes.c_void_p()
            self.check("cuModuleLoadData", ctypes.byref(handle), case["text"].encode() + b"\0")
            self.modules[case["module"]] = handle
        found = ctypes.c_void_p()
        self.check("cuModuleGetFunction", ctypes.byref(found), self.modules[case["module"]], case["entry"].encode())
        if case["shared"] > SHARED_LIMIT:
            self.check("cuFuncSetAttribute", found, 8, case["shared"])
        return found

    def tensor_map(self, base, kept):
        """128 bytes, by the driver."""
        _, offset, code, sizes, strides, box, steps, swizzle, nan = kept
        raw = ctypes.create_string_buffer(192)
        at, rank, u64, u32 = ctypes.addressof(raw) + 63 & ~63, len(sizes), ctypes.c_uint64, ctypes.c_uint32
        self.check(
            "cuTensorMapEncodeTiled", ctypes.c_void_p(at), code, u32(rank), ctypes.c_void_p(base + offset),
            (u64 * rank)(*sizes), (u64 * max(rank - 1, 1))(*strides), (u32 * rank)(*box), (u32 * rank)(*steps),
            0, swizzle, 0, int(nan),
        )  # fmt: skip
        return ctypes.string_at(at, 128)

    def run(self, case):
        """The arena after the launch."""
        function, memory, size = self.function(case), ctypes.c_uint64(), case["before"].nbytes
        self.check("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(size))
        self.check("cuMemcpyHtoD_v2", memory, case["before"].ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(size))
        values = {
            "pointer": lambda p: (memory.value + p[1]).to_bytes(8, "little"),
            "map": lambda p: self.tensor_map(memory.value, p),
            "bytes": lambda p: p[1],
        }
        raw = [ctypes.create_string_buffer(values[p[0]](p) + bytes(64), 256) for p in case["params"]]
        aligned = [ctypes.create_string_buffer(320) for _ in raw]
        places = [ctypes.addressof(b) + 63 & ~63 for b in aligned]
        for place, value in zip(places, raw, strict=False):
            ctypes.memmove(place, value, 256)
        self._launch(function, case, (ctypes.c_void_p * max(len(places), 1))(*places))
        self.check("cuCtxSynchronize")
        out = np.empty_like(case["before"])
        self.check("cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), memory, ctypes.c_size_t(size))
        self.check("cuMemFree_v2", memory)
        return out

    def _launch(self, function, case, params):
        grid, block = three(case["grid"]), three(case["block"])
        if case["cluster"] is None:
            self.check("cuLaunchKernel", function, *grid, *block, case["shared"], None, params, None)
            return
        attribute = Attribute(4, b"", (ctypes.c_uint * 16)(*three(case["cluster"])))
        config = Config((ctypes.c_uint * 7)(*grid, *block, case["shared"]), None, ctypes.pointer(attribute), 1)
        self.check("cuLaunchKernelEx", ctypes.byref(config), function, params, None)


def three(extent):
    """x, y and z."""
    return (*((extent,) if isinstance(extent, int) else tuple(extent)), 1, 1)[:3]


def difference(case, got):
    """How many bytes of the arrays differ, and by how much at most where they are numbers."""
    wrong, worst = 0, 0.0
    for offset, size, kind in case["types"]:
        a, b = got[offset : offset + size], case["after"][offset : offset + size]
        wrong += int((a != b).sum())
        if kind[1] == "f":
            x, y = (v.view(kind).astype("f8") for v in (a, b))
            with np.errstate(all="ignore"):
                gap = np.abs(x - y) / np.maximum(np.maximum(np.abs(x), np.abs(y)), 1e-300)
            worst = max([worst, *gap[np.isfinite(gap)].tolist()])
    return wrong, worst


def replay(path, options):
    """Run all, print what differs and the sum; 1 where something failed to run."""
    wordy, skipped = "-v" in options, [o for o in options if o != "-v"]
    cases = pickle.loads(Path(path).read_bytes())
    gpu, cases, same, failed = Gpu(), [c for c in cases if not any(s in c["test"] for s in skipped)], 0, 0
    for case in cases:
        if wordy:  # before the launch: a kernel that never ends is then known by name
            print(case["test"], flush=True)
        signal.alarm(PATIENCE)
        try:
            wrong, worst = difference(case, gpu.run(case))
        except RuntimeError as error:
            failed += 1
            print(f"FAILED {case['test']} {case['entry']}: {error}", flush=True)
            gpu.reset()
            continue
        same += not wrong
        if wrong:
            print(f"differs {case['test']}: {wrong} bytes, {worst:.2e} relative", flush=True)
    print(f"{len(cases)} launches: {same} the same bits, {len(cases) - same - failed} differ, {failed} failed")
    return int(failed > 0)


def main():
    """One of the three actions."""
    if len(sys.argv) < 3 or sys.argv[1] not in ("record", "assemble", "replay"):
        sys.exit(__doc__)
    action, path, *rest = sys.argv[1:]
    actions = {"record": lambda: record(path, rest), "assemble": lambda: assemble(path)}
    return actions.get(action, lambda: replay(path, rest))()


if __name__ == "__main__":
    sys.exit(main())
