"""Property-based requests of a server's OpenAPI page, by schemathesis (not installed with the package).

    python scripts/check_openapi.py [--examples 100] [--schemathesis PATH]

Starts a server with an artifact and a small language model on loopback, and lets schemathesis make requests of
`/openapi.json`, valid ones and not. The exit status is that of schemathesis: 0 if no request ended in a status of 500
or in one that the page does not name.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests/serving")]

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main() -> int:
    """Run schemathesis against a server of this process."""
    import services

    from tessera.serving import ServerOptions, create_app

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--examples", type=int, default=100)
    options.add_argument("--schemathesis", default=shutil.which("schemathesis") or "schemathesis")
    chosen = options.parse_args()
    scores = services.build_scores(Path(tempfile.mkdtemp()) / "scores")
    app = create_app({"scores": scores, "letters": services.make_language_model()}, ServerOptions(longest=128))
    with services.serve(app) as port:
        command = [chosen.schemathesis, "run", f"http://127.0.0.1:{port}/openapi.json", "--checks", CHECKS,
                   "--max-examples", str(chosen.examples), "--seed", "1"]  # fmt: skip
        return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())
