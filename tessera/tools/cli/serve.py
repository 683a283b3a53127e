"""`tessera serve`: serves artifacts, bundles and language models over HTTP."""

from __future__ import annotations

import argparse
import os

from tessera.core.errors import ArgumentError, FileError
from tessera.serving.options import ServerOptions
from tessera.serving.server import name_models, read_api_keys, run_server

KEY_VARIABLE = "TESSERA_API_KEY"


def main(options: argparse.Namespace) -> int:
    """Serve until a signal; exit status 0 after a drain."""
    models = name_models(options.path)
    for name, path in models.items():
        if not path.exists():
            raise FileError(
                f"there is no file or folder {path}", expected="an artifact, a bundle, a GGUF file, or a folder of "
                "safetensors", suggestion=None if name == path.name else f"{name} is the name it would be served by",
            )  # fmt: skip
    keys = read_api_keys(options.api_key_file) if options.api_key_file else ()
    if KEY_VARIABLE in os.environ:
        if not os.environ[KEY_VARIABLE]:
            raise ArgumentError(f"{KEY_VARIABLE} is empty", suggestion="unset it, or set a key")
        keys = (*keys, os.environ[KEY_VARIABLE])
    run_server(
        models, options.host, options.port,
        ServerOptions(
            api_keys=keys, max_body_bytes=options.max_body << 20, max_queue=options.max_queue,
            drain_timeout=options.drain_timeout, max_batch_size=options.max_batch,
            batch_timeout_ms=options.batch_timeout, padding=options.padding, cache_size=options.cache,
            replicas=options.replicas, processes=options.processes, slots=options.slots, longest=options.longest,
            pages=options.pages,
        ),
    )  # fmt: skip
    return 0
