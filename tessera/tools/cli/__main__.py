"""`python -m tessera.tools.cli`: the same as the command `tessera`."""

from tessera.tools.cli.main import main

raise SystemExit(main())
