"""What the three commands have in common before their own arguments: `--version`, and that an argument which names a
place names one. An empty word is what a script gives whose variable was not set, and Python reads it as the folder one
is in.

Not here: the arguments themselves (each package's cli.py), and what is at the place (outputs.py, rundir.py, …).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from protocol.limits import PROTOCOL_VERSION


class Parser(argparse.ArgumentParser):
    """In which `type=Path`, also of its subcommands, takes no empty word."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.register("type", Path, lambda text: Path(not_empty(text)))


def add_version(parser: argparse.ArgumentParser) -> None:
    """`--version`: of the package, and of the protocol that it speaks."""
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and end")


class _Version(argparse.Action):
    """Looks the version up only when it is asked for, which takes longer than to parse."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        major, minor = PROTOCOL_VERSION
        print(f"{parser.prog} {version('rlcommons')} (rlcommons protocol {major}.{minor})")
        parser.exit()


def not_empty(text: str) -> str:
    """An argument's type, for what names a place and is no path alone (a URL, `hub:…`)."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty: name a file or a folder ('.' is the one you are in)")
    return text
