"""Published cycle counts of public CSL programs, with the command lines that reproduce each on the CSL simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Figure:
    """Counts that the authors of a program recorded on the vendor's simulator.

    `count` says where a run's own counts are: a pattern in its output, "launch" (the longest launch), "window" (from a
    time stamp that the host launches before the program to one that it launches behind it), or "iteration" (the
    difference of the ends of two runs on PE (1, 1), of 2 and 4 iterations STEPS). `fitted` says whether a part of the
    cost model was chosen by it; the others are the holdout.
    """

    name: str
    repository: str
    folder: str
    layout: str
    run: str
    count: str
    published: tuple[float, ...]
    fitted: bool = True
    environment: dict[str, str] = field(default_factory=dict)


VENDOR, STREAM, GRAPH = "Cerebras/csl-examples", "leightonw-cerebras/stream", "siddharthbc/CSR-graph-coloring"
STENCIL, HOMEWORK, SLIDES = "Jorineg/cerebras", "da-luce/cs5220_hw4", "n-io/sliding-window"


def _flags(width: int, height: int, params: str, arch: str = "wse3", frame: tuple[int, int] = (7, 2)) -> str:
    dims = f"--fabric-dims={width + frame[0]},{height + frame[1]} --fabric-offsets=4,1"
    return f"--arch={arch} {dims} --params={params} --memcpy --channels=1 --max-inlined-iterations=1000000 -o out"


def _list_vendor() -> Iterator[Figure]:
    """The vendor's examples; the counts are those of the FABRICA benchmark (WSE-3, SDK 1.4).

    Its first counts are windows of the host, the later ones those of the device.
    """
    gemm, gemv = "P:4,Mt:14,Kt:14,Nt:14", "kernel_rows:{0},kernel_cols:{0},matrix_rows:{1},matrix_cols:{2}"
    rows = (
        ("gemm-collectives_2d", 4, gemm, 51425, "launch", True),
        ("gemm-collectives_2d", 4, gemm, 51738, "window", False),
        ("gemv-collectives_2d", 2, gemv.format(2, 16, 8), 3212, "launch", True),
        ("gemv-collectives_2d", 4, gemv.format(4, 32, 16), 3670, "launch", True),
        ("gemv-collectives_2d", 4, gemv.format(4, 32, 16), 3999, "window", False),
        ("gemv-collectives_2d", 8, gemv.format(8, 64, 32), 3921, "launch", False),
        ("cholesky", 10, "P:10,Nt:4", 12479, "window", True),
        ("residual", 2, "width:2,height:2,LOCAL_OUT_SZ:3,LOCAL_IN_SZ:2", 674, "window", False),
    )  # fmt: skip
    for name, side, params, cycles, count, fitted in rows:
        title = f"{name} {side}x{side}" + (" with the host" if count == "window" else "")
        flags = f"layout.csl {_flags(side, side, params)}"
        yield Figure(title, VENDOR, f"benchmarks/{name}", flags, "run.py --name out", count, (cycles,), fitted)
    yield Figure(
        "single-tile-matvec 2x2", VENDOR, "benchmarks/single-tile-matvec",
        f"src/layout_matvec.csl {_flags(2, 2, 'width:2,height:2,tile_size:25,iters:1')}", "run.py --name out --verify",
        r"Max cycles \(.*\):\s+(\d+)", (780,),
    )  # fmt: skip


def _list_solvers() -> Iterator[Figure]:
    """The vendor's solvers on 5 x 5 PEs, on the device and from the host; counts of FABRICA (WSE-3, SDK 1.4)."""
    colors = " ".join(f"--params=C{number}_ID:{number}" for number in range(9))
    flags = _flags(5, 5, "width:5,height:5,MAX_ZDIM:5,BLOCK_SIZE:2") + f" {colors}"
    buffers = "--width-west-buf=0 --width-east-buf=0"
    for name, layout, script, iterations, cycles in (
        ("power-method", "layout_power", "device_run", 10, 43436),
        ("power-method", "layout", "run", 1, 4877),
        ("conjugate-gradient", "layout_cg", "device_run", 2, 11635),
        ("conjugate-gradient", "layout", "run", 2, 14958),
        ("preconditioned-conjugate-gradient", "layout_pcg", "device_run", 2, 13826),
        ("preconditioned-conjugate-gradient", "layout", "run", 2, 17197),
        ("bicgstab", "layout_bicgstab", "device_run", 20, 59385),
        ("bicgstab", "layout", "run", 2, 25970),
        ("7pt-stencil-spmv", "layout", "run", 0, 2129),
    ):  # fmt: skip
        options = f"-m=5 -n=5 -k=5 --zDim=5 --latestlink out --channels=1 {buffers} --run-only"
        options += f" --max-ite={iterations}" if iterations else ""
        yield Figure(
            f"{name}, {script}.py", VENDOR, f"benchmarks/{name}", f"src/{layout}.csl {flags} {buffers}",
            f"{script}.py {options}", r"cycles_send = (\d+)", (cycles,),
            cycles in (11635, 2129),
        )  # fmt: skip


def _list_transforms() -> Iterator[Figure]:
    """The vendor's 3D Fourier transform; the counts are those of lingzhi227/MIMD_dataflow (WSE-3, SDK 2.10)."""
    for side, size, cycles in ((8, 32, 224394), (16, 64, 519341)):
        params = f"N:{size},NUM_PENCILS_PER_DIM:{size // side},FP:1"
        yield Figure(f"fft-3d {size}^3", VENDOR, "benchmarks/fft-3d", f"layout.csl {_flags(side, side, params)}",
                     "run.py --name out -no_check", r", (\d+) cycles", (cycles,))  # fmt: skip


def _list_stream() -> Iterator[Figure]:
    """STREAM on one PE of WSE-2: two lengths of each operation."""
    counts = {
        "add_f16": ((256, 76), (512, 140)), "copy_f16": ((256, 74), (512, 138)), "copy_f32": ((128, 74), (256, 138)),
        "scale_f16": ((256, 75), (512, 139)), "scale_f32": ((128, 139), (256, 267)),
        "triad_f16": ((256, 77), (512, 141)), "triad_f32": ((128, 140), (256, 268)),
    }  # fmt: skip
    for name, rows in counts.items():
        test, width = name.split("_f")
        for size, cycles in rows:
            flags = _flags(1, 1, f"width:1,height:1,stride:1,size:{size}", "wse2")
            yield Figure(
                f"STREAM {name} {size}", STREAM, ".", f"{name}/layout.csl {flags}",
                f"run.py --name out --test {test} --data-width {width}", r"Max cycles \(.*\):\s+(\d+)", (cycles,),
                size < 256 or (size == 256 and width == "16"), {"TESSERA_CSL_SDK": "0.9"},
            )  # fmt: skip


def _list_graph() -> Iterator[Figure]:
    """Experiments with wavelets, data tasks and the vendor's allreduce on WSE-3."""

    def spike(name: str, folder: str, size: tuple[int, int], params: str, run: str, count: str,
              published: tuple[float, ...], fitted: bool = True) -> Figure:  # fmt: skip
        layout = f"./src/layout.csl {_flags(*size, params, 'wse3', (8, 3))}"
        return Figure(name, GRAPH, f"spikes/experiments/{folder}", layout, run, count, published, fitted)

    for n, cycles in ((2, 735.06), (4, 874.06), (8, 1282.06)):
        yield spike(
            f"allreduce {n}x{n}", "allreduce_spike", (n, n), f"width:{n},height:{n},C0_ID:8",
            f"run.py --width {n} --height {n} --calls 10 --out-dir out",
            r"slowest-PE cycles/call\s+:\s+([\d.]+)", (cycles,), n < 8,
        )  # fmt: skip
    yield spike(
        "wavelets of 5 PEs", "pipelined_lww_1d_spike", (6, 1), "WIDTH:6,HEIGHT:1,C_BASE:0",
        "run.py --width 6 --out-dir out", r"0x[0-9a-f]+\s+\d+\s+\d+\s+(\d+)", (0, 41, 69, 100, 131, 162),
    )  # fmt: skip
    yield spike(
        "wavelets over a bridge", "pipelined_lww_1d_seg_spike", (10, 1), "WIDTH:10,HEIGHT:1,S:5,C_BASE:0,C_BRIDGE:8",
        "run.py --width 10 --S 5 --out-dir out", r"0x[0-9a-f]+\s+\d+\s+(\d+)",
        (0, 41, 69, 100, 146, 190, 190, 223, 257, 289),
    )  # fmt: skip
    yield spike(
        "one wavelet through 8 PEs", "rotating_root_spike", (8, 1), "WIDTH:8,BCAST_ID:8",
        "run.py --width 8 --out-dir out", r"end-to-end broadcast: (\d+)", (28,),
    )  # fmt: skip
    yield spike(
        "one wavelet through 4x4 PEs", "rotating_root_2d_spike", (4, 4), "WIDTH:4,HEIGHT:4,C_E_ID:8,C_S_ID:9",
        "run.py --width 4 --height 4 --out-dir out", r"(?:fanout|spine|corner) .*: (\d+) cyc", (34, 34, 67),
    )  # fmt: skip


def _list_stencils() -> Iterator[Figure]:
    """Cycles of an iteration of two stencils: one cell on each PE, and tiles (radius 1)."""
    for side, counts in ((3, (12, 17)), (4, (15, 21)), (6, (16, 23)), (8, (16, 24))):
        for arch, cycles in zip(("wse2", "wse3"), counts, strict=True):
            flags = _flags(side, side, f"w:{side},h:{side},steps:STEPS", arch)
            yield Figure(
                f"stencil {side}x{side} {arch}", STENCIL, "non-tiled-tencil", f"layout.csl {flags}",
                "run.py --name out", "iteration", (cycles,), side < 8,
            )  # fmt: skip
    for (w, h, tw, th), counts in (
        ((3, 3, 1, 1), (125, 155)), ((6, 4, 2, 1), (131, 162)), ((6, 10, 2, 4), (174, 204)),
        ((14, 14, 6, 6), (338, 244)), ((17, 17, 5, 5), (286, 191)), ((18, 18, 8, 8), (551, 356)),
        ((32, 32, 10, 10), (790, 558)), ((44, 29, 14, 9), (841, 676)), ((42, 42, 20, 20), (2669, 1788)),
    ):  # fmt: skip
        params = f"w:{w},h:{h},tile_width:{tw},tile_height:{th},radius:1"
        for arch, cycles in zip(("wse2", "wse3"), counts, strict=True):
            flags = _flags((w - 2) // tw + 2, (h - 2) // th + 2, params, arch)
            yield Figure(
                f"stencil {w}x{h} in tiles of {tw}x{th} {arch}", STENCIL, "tiled-stencil", f"layout.csl {flags}",
                "run.py --name out --num-iterations STEPS", "iteration", (cycles,),
                (tw, th) not in ((2, 1), (14, 9)),
            )  # fmt: skip


def _list_homework() -> Iterator[Figure]:
    """A student's product of matrices with data tasks and a ring on WSE-2."""
    for sizes, cycles in (
        ((2, 2, 8, 8, 8), 2194), ((4, 4, 16, 16, 16), 4432), ((2, 4, 8, 8, 8), 2095), ((2, 8, 16, 16, 16), 6898),
        ((4, 8, 16, 16, 16), 4262), ((4, 8, 32, 16, 32), 8895),
    ):  # fmt: skip
        x, y, m, h, n = sizes
        params = f"kernel_x_dim:{x},kernel_y_dim:{y},M:{m},N:{n},H:{h}"
        flags = _flags(
            x, y, f"{params},MEMCPYH2D_DATA_1_ID:2,MEMCPYH2D_DATA_2_ID:3,MEMCPYD2H_DATA_1_ID:4", "wse2", (8, 2)
        )
        yield Figure(
            f"homework {x}x{y}, {m}x{h}x{n}", HOMEWORK, ".", f"layout.csl {flags}", "run.py --name out",
            r"Max:\s+(\d+)", (cycles,), y < 8,
        )  # fmt: skip


def _list_slides() -> Iterator[Figure]:
    """Vectors that slide along a row of PEs through switches, on WSE-2: the left, the middle and the right PE."""
    to_the_right = {(8, 1): (32, 39, 12), (8, 101): (1071, 796, 12), (8, 181): (1871, 1396, 12)}
    both_ways = {
        (8, 1): (27, 41, 27), (8, 101): (468, 625, 1129), (8, 491): (2106, 2920, 5374),
        (16, 1): (27, 46, 27), (16, 101): (938, 1096, 2100), (16, 491): (4254, 5153, 10057),
        (32, 1): (27, 54, 27), (32, 101): (1809, 2115, 4119), (32, 491): (8435, 10132, 19936),
    }  # fmt: skip
    for folder, rows in (("synchronous-slide-right", to_the_right), ("synchronous-slide", both_ways)):
        for (width, size), cycles in rows.items():
            flags = _flags(width, 1, f"kernel_width:{width},num_elems:{size}", "wse2")
            yield Figure(
                f"{folder} of {size} on {width} PEs", SLIDES, folder, f"layout.csl {flags}",
                "run.py --name=out --cmaddr=", r"(?:Left|Middle|Right): +([\d.]+)", cycles,
            )  # fmt: skip


def list_figures() -> list[Figure]:
    """All figures."""
    programs = (
        _list_vendor,
        _list_solvers,
        _list_transforms,
        _list_stream,
        _list_graph,
        _list_stencils,
        _list_homework,
        _list_slides,
    )
    return [figure for program in programs for figure in program()]
