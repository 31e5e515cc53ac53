"""`python -m pellucid` is the `pellucid` command."""

from pellucid.cli import main

main()
