"""What the commands in `tools/` execute: finds Tessera, installed or not, and runs the tool that is named."""

import sys
from pathlib import Path


def main() -> int:
    """Run `cslc` or `cs_python` with the rest of the command line."""
    sys.path[0] = str(Path(__file__).resolve().parents[5])  # this script's folder has no place in a program's path
    from tessera.interp.target.csl.host import cs_python, cslc

    tools = {"cslc": cslc.main, "cs_python": cs_python.main}
    return tools[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
