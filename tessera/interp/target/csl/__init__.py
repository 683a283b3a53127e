"""CSL simulator: parses, compiles and simulates CSL text; independent of every code generator."""

from tessera.interp.target.csl.host import host_tools_folder
from tessera.interp.target.csl.text.parser import parse, parse_file

__all__ = ["host_tools_folder", "parse", "parse_file"]
