"""Compile the CUDA sources beside this script to PTX text with nvcc, the only step that needs it."""

import subprocess
from pathlib import Path

HERE = Path(__file__).parent

for source in sorted(HERE.glob("*.cu")):
    for arch in ("sm_80", "sm_90"):
        out = HERE / f"{source.stem}.{arch}.ptx"
        command = ["nvcc", "-ptx", "-lineinfo", "-std=c++17", "-diag-suppress=20054", f"-arch={arch}"]
        command += [source.name, "-o", out.name]
        subprocess.run(command, cwd=HERE, check=True)
        # Places of headers and of this folder say nothing about the code and differ between machines.
        lines = out.read_text().splitlines()
        kept = [
            f'\t.file\t{x.split()[1]} "{Path(x.split()[2].strip(chr(34))).name.strip(chr(34))}"'
            if x.lstrip().startswith(".file")
            else x
            for x in lines
        ]
        out.write_text("\n".join(x.rstrip() for x in kept) + "\n")
