"""`python -m jdiloco` is the `jdiloco` command."""

from jdiloco.cli import main

main()
