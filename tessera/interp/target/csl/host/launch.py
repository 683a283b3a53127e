"""Entry point of the commands in `tools/`: finds Tessera, installed or not, and runs the named tool."""

import sys
from pathlib import Path


def main() -> int:
    """Run `cslc` or `cs_python` with the rest of the command line."""
    sys.path[0] = str(Path(__file__).resolve().parents[5])  # a program must not import from this script's folder
    from tessera.interp.target.csl.host import cs_python, cslc

    tools = {"cslc": cslc.main, "cs_python": cs_python.main}
    return tools[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
