"""`python -m gemmtune`: the command line."""

from gemmtune.cli import main

main()
