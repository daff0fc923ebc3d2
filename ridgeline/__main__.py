"""`python -m ridgeline …` is the same as the installed `ridgeline` command."""

from ridgeline.cli import main

raise SystemExit(main())
