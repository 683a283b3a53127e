"""The driver's calls that run one recorded launch on a GPU: NumPy and libcuda alone."""

import ctypes

import numpy as np

SHARED_LIMIT = 48 << 10  # beyond this a kernel must ask


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
        if case["cooperative"]:
            self.check("cuLaunchCooperativeKernel", function, *grid, *block, case["shared"], None, params)
            return
        if case["cluster"] is None:
            self.check("cuLaunchKernel", function, *grid, *block, case["shared"], None, params, None)
            return
        attribute = Attribute(4, b"", (ctypes.c_uint * 16)(*three(case["cluster"])))
        config = Config((ctypes.c_uint * 7)(*grid, *block, case["shared"]), None, ctypes.pointer(attribute), 1)
        self.check("cuLaunchKernelEx", ctypes.byref(config), function, params, None)


def three(extent):
    """x, y and z."""
    return (*((extent,) if isinstance(extent, int) else tuple(extent)), 1, 1)[:3]
