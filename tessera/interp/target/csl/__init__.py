"""CSL text, read and run on its own: knows nothing of any generator."""

from tessera.interp.target.csl.host import host_tools_folder
from tessera.interp.target.csl.parser import parse, parse_file

__all__ = ["host_tools_folder", "parse", "parse_file"]
