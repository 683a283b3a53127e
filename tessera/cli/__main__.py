"""`python -m tessera.cli`: the same as the command `tessera`."""

from tessera.cli.main import main

raise SystemExit(main())
