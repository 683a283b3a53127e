"""Web modules: what the generator of a WebAssembly object and its callers agree on."""

from __future__ import annotations

MACHINE = "wasm32"
OBJECT_FILE, DESCRIPTION_FILE = "kernels.o", "program.json"
# The functions of a module: the first executes the launch plan, the second gives the address of the parameters.
RUN, BASE = "tessera_run", "tessera_base"
MAX_BYTES = 1 << 31  # of all memory of a module: browsers give 2 to 4 GiB
