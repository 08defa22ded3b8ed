"""What the three commands ask of any argument that names a place: that it names one. An empty word is what a script
gives whose variable was not set, and Python reads it as the folder one is in.

Not here: the arguments themselves (each package's cli.py), and what is at the place (outputs.py, rundir.py, …).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


class Parser(argparse.ArgumentParser):
    """In which `type=Path`, also of its subcommands, takes no empty word."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", Path, lambda text: Path(not_empty(text)))


def not_empty(text: str) -> str:
    """An argument's type, for what names a place and is no path alone (a URL, `hub:…`)."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or a folder ('.' is the one you are in)")
    return text
