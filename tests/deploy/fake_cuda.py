"""A stand-in for CUDA's driver: memory of the host, and launches that the PTX emulator runs."""

import ctypes
import itertools
import re
import subprocess

import numpy as np

from tessera.interp.target.ptx import PtxModule

HEADER = """
typedef int CUresult, CUdevice;
typedef struct context *CUcontext;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct stream *CUstream;
typedef unsigned long long CUdeviceptr;
enum { CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
CUresult cuInit(unsigned), cuDeviceGet(CUdevice *, int), cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuCtxSetCurrent(CUcontext), cuCtxSynchronize(void), cuDeviceGetAttribute(int *, int, CUdevice);
CUresult cuModuleLoadData(CUmodule *, const void *), cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuFuncSetAttribute(CUfunction, int, int), cuMemAlloc(CUdeviceptr *, unsigned long), cuMemFree(CUdeviceptr);
CUresult cuMemcpyHtoD(CUdeviceptr, const void *, unsigned long), cuMemcpyDtoH(void *, CUdeviceptr, unsigned long);
CUresult cuMemsetD8(CUdeviceptr, unsigned char, unsigned long), cuGetErrorString(CUresult, const char **);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void **, void **);
"""
SOURCE = """
#include "cuda.h"
#include <stdlib.h>
#include <string.h>
int live = 0, fail = 0;
CUresult (*hook)(const char *, unsigned *, unsigned *, unsigned, void **);
struct { CUdeviceptr at; unsigned long size; } blocks[64];
CUresult cuInit(unsigned n) { return fail; }
CUresult cuDeviceGet(CUdevice *d, int n) { return *d = 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
CUresult cuCtxSynchronize(void) { return 0; }
CUresult cuDeviceGetAttribute(int *n, int a, CUdevice d) { *n = 3; return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *text) { *m = (CUmodule)text; return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name) { *f = (CUfunction)strdup(name); return 0; }
CUresult cuFuncSetAttribute(CUfunction f, int a, int n) { return 0; }
CUresult cuMemAlloc(CUdeviceptr *p, unsigned long n) {
  *p = (CUdeviceptr)memset(malloc(n), 0xff, n);
  for (int i = 0; i < 64; i++) if (!blocks[i].at) { blocks[i].at = *p, blocks[i].size = n, live++; return 0; }
  return 2;
}
CUresult cuMemFree(CUdeviceptr p) {
  for (int i = 0; i < 64; i++) if (blocks[i].at == p) { blocks[i].at = 0, live--; free((void *)p); return 0; }
  return 1;
}
CUresult cuMemcpyHtoD(CUdeviceptr p, const void *from, unsigned long n) { memcpy((void *)p, from, n); return 0; }
CUresult cuMemcpyDtoH(void *to, CUdeviceptr p, unsigned long n) { memcpy(to, (void *)p, n); return 0; }
CUresult cuMemsetD8(CUdeviceptr p, unsigned char v, unsigned long n) { memset((void *)p, v, n); return 0; }
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "the fake driver fails"; return 0; }
CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned x, unsigned y, unsigned z,
                        unsigned shared, CUstream s, void **given, void **extra) {
  unsigned grid[3] = {gx, gy, gz}, block[3] = {x, y, z};
  return hook((const char *)f, grid, block, shared, given);
}
unsigned long room(CUdeviceptr p) {
  for (int i = 0; i < 64; i++)
    if (blocks[i].at && p >= blocks[i].at && p < blocks[i].at + blocks[i].size)
      return blocks[i].at + blocks[i].size - p;
  return 0;
}
"""
TRIPLE = ctypes.POINTER(ctypes.c_uint)
HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, TRIPLE, TRIPLE, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p))
SCALARS = {"f32": np.float32, "f64": np.float64, "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16}
SCALARS |= {f"{k}{n}": np.dtype(f"{t}{n // 8}").type for n in (32, 64) for k, t in (("u", "u"), ("s", "i"), ("b", "u"))}


NUMBERS = itertools.count()  # a process loads one library of a name


class FakeGpu:
    """The driver, built in a folder: `load` links a launcher with it; `launches` lists what ran."""

    def __init__(self, folder):
        self.folder, self.launches, self.name = folder, [], f"cuda{next(NUMBERS)}"
        folder.mkdir()
        (folder / "cuda.h").write_text(HEADER)
        (folder / "cuda.c").write_text(SOURCE)
        build = ["cc", "-w", "-shared", "-fPIC", "cuda.c", "-o", f"lib{self.name}.so"]
        subprocess.run(build, cwd=folder, check=True)

    def load(self, made):
        """The launcher of a standalone folder as a library of this process."""
        source = (made.folder / "kernels.ptx").read_text()
        module = PtxModule(source, "kernels.ptx")
        flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", f"-I{self.folder}", "-shared", "-fPIC"]
        link = [f"-L{self.folder}", f"-l{self.name}", f"-Wl,-rpath,{self.folder}", "-lpthread"]
        command = ["cc", *flags, f"{made.name}.c", "-o", "launcher.so", *link]
        subprocess.run(command, cwd=made.folder, check=True)
        self.driver = ctypes.CDLL(str(self.folder / f"lib{self.name}.so"))
        self.driver.room.argtypes, self.driver.room.restype = (ctypes.c_uint64,), ctypes.c_ulong

        def run(name, grid, block, shared, given):
            name, shape = name.decode(), (tuple(grid[:3]), tuple(block[:3]))
            self.launches.append((name, *shape, shared))
            head = re.search(rf"\.entry {re.escape(name)}\s*\((.*?)\)", source, re.DOTALL)[1]
            kinds = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)", head)
            values = [self._read(kind, given[i]) for i, kind in enumerate(kinds)]
            module.launch(name, shape[0], shape[1], values, shared)
            return 0

        self._hook = HOOK(run)
        ctypes.c_void_p.in_dll(self.driver, "hook").value = ctypes.cast(self._hook, ctypes.c_void_p).value
        return ctypes.CDLL(str(made.folder / "launcher.so"))

    def _read(self, kind, at):
        word = SCALARS[kind].__call__(0).nbytes
        value = np.frombuffer((ctypes.c_uint8 * word).from_address(at), SCALARS[kind])[0]
        room = self.driver.room(int(value)) if kind in ("u64", "b64") else 0
        return np.frombuffer((ctypes.c_uint8 * room).from_address(int(value)), np.uint8) if room else value
