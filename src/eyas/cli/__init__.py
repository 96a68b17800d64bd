"""The command line: one function a command, no logic."""

from eyas.cli.program import main

__all__ = ["main"]
