"""The words of a command line in whichever order a person writes them: no option takes what belongs to another."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import node.cli
import trainer.cli
import verify.cli
from protocol.identity import Identity
from protocol.limits import PROTOCOL_VERSION
from protocol.run import EnvironmentShare
from trainer.cli import main
from trainer.config import TrainerConfig
from trainer.init import init_run

COMMANDS = {"rlnode": node.cli, "rltrainer": trainer.cli, "rlverify": verify.cli}
ONE, OTHER = (Identity(bytes([number]) * 32).peer_id for number in (1, 2))
ENDING = ("help", "version")  # options that print something and end
WRONG = ONE[:-1]  # a letter was lost as it was copied


def parts(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], argparse.Action]]:
    """Each command below a parser with each of its options."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from parts(below, (*path, name))
        elif action.option_strings and action.dest not in ENDING:
            yield path, action


def command(program: str, path: tuple[str, ...]) -> argparse.ArgumentParser:
    parser = COMMANDS[program]._parser()
    for name in path:
        parser = next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction)).choices[name]
    return parser


CASES = [
    pytest.param(program, path, action.option_strings[-1], id=" ".join((program, *path, action.option_strings[-1])))
    for program, module in COMMANDS.items()
    for path, action in parts(module._parser(), ())
]


@pytest.mark.parametrize(("program", "path", "option"), CASES)
def test_an_option_may_stand_before_or_behind(program: str, path: tuple[str, ...], option: str) -> None:
    parser = command(program, path)
    action = next(each for each in parser._actions if option in each.option_strings)
    value = [] if action.nargs == 0 else [next(iter(action.choices)) if action.choices else "1"]
    behind = [str(number) for number, each in enumerate(parser._actions, 1) if not each.option_strings]
    needed = [each for each in parser._actions if each.required and each.option_strings and each is not action]
    rest = [word for each in needed for word in (each.option_strings[-1], "1")]
    for group in parser._mutually_exclusive_groups:
        if group.required and action not in group._group_actions:
            rest += [next(each.option_strings[-1] for each in group._group_actions if each.nargs == 0)]
    orders = [
        [*rest, option, *value, *behind],
        [*rest, *behind, option, *value],
        [*behind[:1], option, *value, *behind[1:], *rest],
    ]
    first, *others = [vars(parser.parse_args(words)) for words in orders]
    assert all(other == first for other in others)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shares = (EnvironmentShare("tools8@1", "", 1),)
    config = TrainerConfig(listen="/ip4/127.0.0.1/tcp/0", page_port=0)
    path = tmp_path_factory.mktemp("template") / "run"
    return init_run(path, name="test", policy="embedded", environments=shares, config=config).folder.path


@pytest.mark.parametrize(
    "words",
    [
        "RUN --trust ONE WRONG",
        "--trust ONE WRONG RUN",
        "--trust ONE --trust WRONG RUN",
        "--trust ONE,WRONG RUN",
        "--trust ONE, WRONG RUN --json",
        "--trust=ONE WRONG --json RUN",
        "--trust ONE RUN --trust OTHER WRONG",
        "--json --trust WRONG self RUN",
        "--trust WRONG --trust self -- RUN",
    ],
)
def test_every_node_that_is_named_is_read_and_the_run_is_not_taken_for_one(
    template: Path, tmp_path: Path, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong name is told before anything is written, and once the run was found."""
    run = Path(shutil.copytree(template, tmp_path / "run"))
    meant = {"RUN": str(run), "ONE": ONE, "OTHER": OTHER, "WRONG": WRONG}
    written = re.sub("|".join(meant), lambda found: meant[found[0]], words)
    assert main(["serve", *written.split()]) == 2
    told = capsys.readouterr().err
    assert f"--trust: '{WRONG}' is not an Ed25519 peer id" in told, told


@pytest.mark.parametrize("program", COMMANDS)
def test_a_command_tells_its_version_and_that_of_the_protocol(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMANDS[program].main(["--version"])
    assert ended.value.code in (None, 0)
    package, (major, minor) = importlib.metadata.version("rlcommons"), PROTOCOL_VERSION
    assert capsys.readouterr().out == f"{program} {package} (rlcommons protocol {major}.{minor})\n"
