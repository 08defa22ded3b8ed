"""The walls of the house: who may import whom, where each heavy library lives, and that help is quick.

Not here: what any file does.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "verify", "node", "trainer")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Of verify a node uses what it must produce: proofs, draws, and the definition of the rows both come from.
VERIFY_FOR_NODES = ("verify.toploc", "verify.sampling", "verify.model")

# Library → the only files that import it; a folder ends in a slash.
HOMES = {
    "libp2p": ("protocol/net/p2p.py", "protocol/net/hardening.py"),
    "multiaddr": ("protocol/net/p2p.py", "protocol/net/hardening.py"),
    "noise": ("protocol/net/p2p.py", "protocol/net/hardening.py"),
    "trio": ("protocol/net/", "node/", "trainer/gateway.py", "trainer/clerk.py"),
    "fastapi": ("trainer/api.py", "trainer/web/"),
    "starlette": ("trainer/api.py", "trainer/web/"),
    "uvicorn": ("trainer/api.py", "trainer/web/"),
    "vllm": ("node/vllm_engine.py", "node/vllm_worker.py"),
    "msgpack": ("protocol/codec.py", "protocol/net/session.py"),
    "cryptography": ("protocol/identity.py",),
    "zstandard": ("protocol/delta.py",),
    "tokenizers": ("protocol/environments/tokenizer.py",),
    "jinja2": ("protocol/environments/tokenizer.py",),
    "reasoning_gym": ("protocol/environments/reasoning_gym_process.py",),
    "transformers": ("verify/model.py", "verify/prefill.py", "node/", "trainer/"),
    "huggingface_hub": ("trainer/init.py",),
    "sqlite3": (
        "trainer/ledger.py",
        "trainer/ledger_log.py",
        "trainer/ledger_pairs.py",
        "trainer/ledger_nodes.py",
        "trainer/ledger_audits.py",
        "trainer/ledger_learning.py",
        "trainer/ledger_use.py",
        "trainer/ledger_care.py",
    ),
    "wandb": ("trainer/records.py",),
    "rich": ("node/", "trainer/", "verify/"),
}
PROTOCOL_LIBRARIES = {"msgpack", "cryptography", "numpy", "zstandard"}
NET_LIBRARIES = {"trio", "libp2p", "multiaddr", "noise", "msgpack"}
ENVIRONMENT_LIBRARIES = {"tokenizers", "jinja2", "reasoning_gym"}
HEAVY = {
    "torch",
    "transformers",
    "libp2p",
    "vllm",
    "fastapi",
    "uvicorn",
    "numpy",
    "tokenizers",
    "jinja2",
    "trio",
    "safetensors",
}


@dataclass(frozen=True)
class Import:
    file: str  # from the repository's root
    module: str  # with the name imported from it
    top_level: bool  # runs when the file is imported

    @property
    def library(self) -> str:
        return self.module.split(".")[0]

    def within(self, places: tuple[str, ...]) -> bool:
        return any(self.file == place or (place.endswith("/") and self.file.startswith(place)) for place in places)


def python_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    file = path.relative_to(ROOT).as_posix()
    deferred = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(outer)
        for inner in ast.walk(outer)
    }
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            assert statement.level == 0, f"{file}:{statement.lineno} imports relatively"
            names = [f"{statement.module}.{alias.name}" for alias in statement.names]
        else:
            continue
        for name in names:
            yield Import(file, name, id(statement) not in deferred)


def _is_type_checking(statement: ast.AST) -> bool:
    return isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")


IMPORTS = [each for path in python_files() for each in imports_of(path)]


def of(package: str) -> list[Import]:
    return [each for each in IMPORTS if each.file.startswith(f"{package}/")]


def third_party(imports: list[Import]) -> list[Import]:
    known = set(sys.stdlib_module_names) | set(PACKAGES)
    return [each for each in imports if each.library not in known]


def wrong(imports: list[Import]) -> list[str]:
    return sorted({f"{each.file} imports {each.module}" for each in imports})


# --- who may import whom ---


def test_protocol_stands_on_its_own() -> None:
    assert wrong([each for each in of("protocol") if each.library in {"verify", "node", "trainer"}]) == []


def test_protocol_needs_four_libraries_outside_its_network_and_environments() -> None:
    bad = []
    for each in third_party(of("protocol")):
        allowed = PROTOCOL_LIBRARIES
        if each.file.startswith("protocol/net/"):
            allowed = NET_LIBRARIES
        elif each.file.startswith("protocol/environments/"):
            allowed = PROTOCOL_LIBRARIES | ENVIRONMENT_LIBRARIES
        if each.library not in allowed:
            bad.append(each)
    assert wrong(bad) == []


def test_only_the_network_itself_imports_the_network_within_protocol() -> None:
    inside = [each for each in of("protocol") if not each.file.startswith("protocol/net/")]

    assert wrong([each for each in inside if each.module.startswith("protocol.net")]) == []


def test_verify_uses_protocol_and_never_the_network() -> None:
    """But for one file, which reads the log of a run where that lies on a web server."""
    bad = [
        each
        for each in of("verify")
        if each.library in {"node", "trainer"}
        or each.module.startswith("protocol.net")
        or each.library in {"socket", "trio", "asyncio", "sqlite3"}
        or (each.library in {"http", "urllib"} and each.file != "verify/log_source.py")
    ]
    assert wrong(bad) == []


def test_node_uses_of_verify_only_what_it_must_produce() -> None:
    bad = [each for each in of("node") if each.library == "verify" and not each.module.startswith(VERIFY_FOR_NODES)]

    assert wrong(bad) == []


def test_node_and_trainer_never_meet() -> None:
    assert wrong([each for each in of("node") if each.library == "trainer"]) == []
    assert wrong([each for each in of("trainer") if each.library == "node"]) == []


# --- libraries ---


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_at_home_alone(library: str) -> None:
    away = [each for each in IMPORTS if each.library == library and not each.within(HOMES[library])]

    assert wrong(away) == []


def test_torch_is_where_tensors_are() -> None:
    places = ("verify/", "node/", "trainer/")
    assert wrong([each for each in IMPORTS if each.library == "torch" and not each.within(places)]) == []
    networked = [each for each in IMPORTS if each.library == "torch" and each.top_level]
    for file in ("trainer/gateway.py", "trainer/api.py", "trainer/inbox.py", "trainer/ledger.py", "node/session.py"):
        assert not [each for each in networked if each.file == file], f"{file} imports torch when it is imported"


def test_every_library_that_is_imported_is_declared() -> None:
    wanted = list(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        wanted += extra
    declared = {re.match(r"[A-Za-z0-9._-]+", each)[0].lower().replace("_", "-") for each in wanted}  # type: ignore[index]
    owners = importlib.metadata.packages_distributions()
    with_libp2p = {"multiaddr", "noise"}
    missing = {
        each.library
        for each in third_party(IMPORTS)
        if each.library not in with_libp2p
        and not {owner.lower().replace("_", "-") for owner in owners.get(each.library, [each.library])} & declared
    }
    assert missing == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_top_level_name_is_ours_alone(package: str) -> None:
    """The names are generic: another distribution that brings one would shadow ours."""
    assert set(importlib.metadata.packages_distributions().get(package, [])) <= {"rlcommons"}
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None
    assert Path(found.origin).parent == ROOT / package


# --- files ---


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_says_what_it_is_for(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))

    assert docstring, f"{path} opens without a docstring"


def test_no_file_is_called_utils() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc"}
    ours = [path for path in ROOT.glob("*/**/*.py") if not path.relative_to(ROOT).parts[0].startswith(".")]
    assert [path for path in ours if path.stem in vague] == []


def test_no_file_grows_without_bound() -> None:
    """A file of more than 1,000 lines has more than one subject."""
    long = {path.name: len(path.read_text().splitlines()) for path in python_files()}

    assert {name: lines for name, lines in long.items() if lines > 1_000} == {}


# --- speed ---


@pytest.mark.parametrize("command", ["node.cli", "trainer.cli", "verify.cli"])
def test_help_needs_no_heavy_library(command: str) -> None:
    program = (
        "import sys, importlib\n"
        f"module = importlib.import_module('{command}')\n"
        "try: module.main(['--help'])\n"
        "except SystemExit as done: assert not done.code, done.code\n"
        f"print('HEAVY', *sorted(set(sys.modules) & set({sorted(HEAVY)!r})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY", f"{command} --help imports {done.stdout.splitlines()[-1]}"


@pytest.mark.parametrize("module", ["protocol.messages", "protocol.policy", "protocol.run", "protocol.net.session"])
def test_the_wire_needs_no_model_library(module: str) -> None:
    program = (
        f"import sys, {module}; print(*sorted(set(sys.modules) & {{'torch', 'transformers', 'libp2p', 'fastapi'}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)

    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
