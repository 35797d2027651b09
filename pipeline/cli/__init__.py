"""The command line. `main.py` parses it; a file for each group of commands calls `app` and prints.

A module here may import every package. No package imports this one.
"""

from pipeline.cli.main import leave, main, parser

__all__ = ["leave", "main", "parser"]
