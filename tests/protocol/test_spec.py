"""SPEC.md and the code say the same: field tables, messages, registries, examples, thresholds, cited tests.

The limits table has test_limits.py. Not here: whether prose is right.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node import cli as node_cli
from protocol import (
    calibration,
    codec,
    delta,
    envelope,
    identity,
    lease,
    log,
    messages,
    policy,
    run,
    trace,
    verdict,
)
from protocol import command as endings
from protocol.envelope import Signed
from protocol.errors import Code
from trainer import cli as trainer_cli
from verify import check, cli, controls, controls_report, files, inspect, report, run_audit, run_report, thresholds

ROOT = Path(__file__).parent.parent.parent
SPEC = (ROOT / "SPEC.md").read_text()
VECTORS = ROOT / "tests" / "vectors"
# Values that never travel.
LOCAL = (delta.BaseTensor, delta.Section, policy.TensorPlace, run.RunAddress)
OBJECTS = {
    name: cls
    for module in (calibration, delta, envelope, lease, log, messages, policy, run, trace, verdict)
    for name, cls in vars(module).items()
    if dataclasses.is_dataclass(cls) and not name.startswith("_") and cls not in LOCAL
}


def chapter(title: str) -> str:
    """From a heading to the next of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}.*?$(.*?)(?=^#{{1,3}} |\Z)", SPEC, re.M | re.S)
    assert found, title
    return found[2]


def rows(text: str, columns: int) -> list[list[str]]:
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in cells if len(row) == columns and "---" not in row[0]]


def field_table(name: str) -> list[list[str]]:
    found = re.search(rf"^\*\*{name}\*\*\n\n((?:\|.*\n)+)", SPEC, re.M)
    assert found, f"SPEC has no table of {name}"
    return rows(found[1], 4)[1:]


def written(kind: codec.Kind) -> tuple[str, str, list[str]]:
    """Type, presence, and the figures its constraint must name."""
    match kind:
        case codec.Maybe():
            return written(kind.inner)[0], "nil allowed", written(kind.inner)[2]
        case codec.UInt():
            return "`uint`", "required", [] if kind.most == 2**64 - 1 else [_number(kind.most)]
        case codec.Real():
            return "`real`", "required", []
        case codec.Flag():
            return "`flag`", "required", []
        case codec.Bytes():
            return "`bytes`", "required", [_number(n) for n in (kind.least, kind.most) if n is not None]
        case codec.Text():
            return "`text`", "required", [_number(kind.most)]
        case codec.Choice():
            return "`word`", "required", []
        case codec.Many():
            inner = written(kind.inner)
            return f"list of {inner[0]}", "required", [_number(kind.most), *inner[2]]
        case codec.Object():
            return f"`{kind.cls.__name__}`", "required", []
        case codec.Tokens():
            return "`tokens`", "required", [_number(kind.most)]
        case codec.Floats():
            return "`floats`", "required", [_number(kind.most)]
    raise TypeError(kind)


def _number(value: int) -> str:
    return "2^32 − 1" if value == 2**32 - 1 else f"{value:,}"


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_a_field_table_is_the_code_s(name: str) -> None:
    fields = codec.fields_of(OBJECTS[name])
    if not fields:
        assert f"**{name}** has no fields" in SPEC
        return
    table = field_table(name)

    assert [row[0].strip("`") for row in table] == [key for key, _ in fields]
    for (key, kind), (_, type_, presence, constraint) in zip(fields, table, strict=True):
        wanted = written(kind)
        assert (type_, presence) == wanted[:2], key
        assert all(figure in constraint for figure in wanted[2]), (key, constraint)


def test_the_message_table_is_the_code_s() -> None:
    table = [row for row in rows(chapter("9.3 Messages"), 5) if row[0].isdigit()]

    assert {int(row[0]): row[1].strip("`") for row in table} == {
        number: cls.__name__ for number, cls in messages.MESSAGES.items()
    }
    for protocol in (messages.SESSION_PROTOCOL, messages.BLOB_PROTOCOL):
        assert f"`{protocol}`" in chapter("9.1 Transport")


def test_the_domains_are_the_code_s() -> None:
    table = rows(chapter("6.3 Signatures"), 3)[1:]
    signed = {name: cls.DOMAIN for name, cls in OBJECTS.items() if hasattr(cls, "DOMAIN")}

    assert {name: domain.strip("`").encode() for name, domain, _ in table} == signed
    assert set(signed.values()) == {value for name, value in vars(identity).items() if name.startswith("DOMAIN_")}


def test_the_registry_of_codes_is_the_code_s() -> None:
    assert [row[0].strip("`") for row in rows(chapter("11.1 Error codes"), 4)[1:]] == list(Code)


def test_the_registry_of_reasons_is_the_code_s() -> None:
    table = rows(chapter("11.2 Reasons"), 3)[1:]
    not_judged = {row[0].strip("`") for row in table if row[1].startswith("not judged")}

    assert [row[0].strip("`") for row in table] == list(verdict.Reason)
    assert not_judged == verdict.NOT_JUDGED_REASONS


def test_the_order_of_checks_is_the_code_s() -> None:
    named = [row[1].strip("`") for row in rows(chapter("10.1 Order of checks"), 4)[1:]]

    assert list(dict.fromkeys(named)) == [*check.CHEAP, *check.DEAR]


def test_the_limits_of_evidence_are_the_code_s() -> None:
    table = {row[0].strip("`"): row[1:3] for row in rows(chapter("10.6 Limits of evidence"), 4)[1:]}
    for place, worker, verifier in ((0, "float32", "float32"), (1, "bfloat16", "bfloat16"), (1, "bfloat16", "float32")):
        held = dataclasses.asdict(thresholds.limits_for(worker, verifier))
        assert {name: float(cells[place]) for name, cells in table.items()} == held, (worker, verifier)


def entry(reference: str) -> dict[str, object]:
    file, name = reference.split("#")
    content = json.loads((VECTORS / file).read_text())
    return next(each for side in ("valid", "invalid") for each in content[side] if each["name"] == name)


def test_every_example_in_hex_is_a_vector() -> None:
    blocks = re.findall(r"^```hex (\S+)\n(.*?)^```$", SPEC, re.M | re.S)

    assert len(blocks) >= 6
    for reference, text in blocks:
        assert text.replace("\n", "") == entry(reference)["bytes"], reference


def test_every_readable_example_is_a_vector() -> None:
    blocks = re.findall(r"^```json (\S+)\n(.*?)^```$", SPEC, re.M | re.S)

    assert len(blocks) >= 6
    for reference, text in blocks:
        assert json.loads(text) == entry(reference)["value"], reference


def test_the_json_verdict_has_the_keys_that_are_written() -> None:
    finger = verdict.Fingerprint("", "", "", "")
    passed = verdict.Check("signature", verdict.CheckOutcome.PASSED, None, None, None, None, None, "")
    ours = report.Judged(verdict.Outcome.ACCEPTED, None, (passed,), True, 1.0, finger)
    signed = verdict.Verdict(
        run=bytes(32),
        trace_digest=bytes(32),
        lease_id=bytes(16),
        slot=0,
        node=bytes(32),
        policy_version=0,
        policy_root=bytes(32),
        outcome=verdict.Outcome.ACCEPTED,
        reason=None,
        audited=True,
        reward=1.0,
        checks=(passed,),
        calibration=None,
        scores=(),
        verifier=finger,
        judged_ms=0,
    )
    of_verdict = SPEC.split("The JSON verdict:")[1].split("\nA conformant ")[0]
    table = {row[0].strip("`"): row[1] for row in rows(of_verdict, 2)[1:]}
    written = report.as_json(ours, bytes(32), signed)

    assert list(written) == list(table)
    assert written["spec"] == table["spec"].strip("`").strip('"')
    for key in ("checks", "verifier", "trainer"):
        inner = written[key][0] if key == "checks" else written[key]
        assert set(re.findall(r"`(\w+)`", table[key])) == set(inner), key


def of_command(command: str) -> str:
    """What chapter 14 says of a command, from its usage on."""
    chapter_14 = SPEC.split("\n## 14 ")[1].split("\n## 15 ")[0]
    parts = re.split(r"\n    rlverify (?=\w+ )", chapter_14)
    return next(part for part in parts if part.startswith(f"{command} "))


def keys_of_json(command: str) -> dict[str, str]:
    """Key → what stands beside it; a row may name several keys."""
    table = rows(of_command(command).split("| key | value |")[1], 2)
    return {key: row[1] for row in table for key in re.findall(r"`(\w+)`", row[0])}


def words(text: str) -> set[str]:
    return set(re.findall(r"`(\w+)`", text))


@pytest.mark.parametrize("command", ["check", "inspect", "calibrate", "controls", "audit"])
def test_the_arguments_and_exit_codes_of_rlverify_are_those_of_the_command(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    told = capsys.readouterr().out
    text = of_command(command)
    taken = set(re.findall(r"--[a-z-]+", told.split("exit codes:")[0])) - {"--help"}
    arguments = [row[0] for row in rows(text.split("| exit code")[0], 2)[1:]]
    codes = [row[0] for row in rows(text, 2) if row[0][:1].isdigit()]

    assert {word for text in arguments for word in re.findall(r"--[a-z-]+", text)} == taken
    assert set(re.findall(r"--[a-z-]+", text.splitlines()[0])) == taken
    assert codes == re.findall(r"^  (\d[\d, ]*?)  ", told, re.M)


@pytest.mark.parametrize(("module", "program"), [(node_cli, "rlnode"), (trainer_cli, "rltrainer"), (cli, "rlverify")])
def test_the_endings_that_all_commands_share_are_in_every_list_of_exit_codes(
    capsys: pytest.CaptureFixture[str], module: Any, program: str
) -> None:
    with pytest.raises(SystemExit):
        module.main(["--help"])
    told = capsys.readouterr().out.split("exit codes:")[1]

    for code in (endings.FAULT, endings.INTERRUPTED, endings.BROKEN_PIPE):
        assert re.search(rf"^ .*\b{code}\b", told, re.M), (program, code)


def test_the_json_of_inspect_has_the_keys_that_the_spec_lists(tmp_path: Path) -> None:
    path = tmp_path / "trace.msgpack"
    path.write_bytes(bytes.fromhex(str(entry("trace_file.json#full")["bytes"])))
    written = inspect.as_json(files.read_evidence(path), None)
    listed = keys_of_json("inspect")

    assert set(written) == set(listed)
    for key in ("policy", "prompt", "engine"):
        assert set(written[key]) == words(listed[key]), key
    assert set(written["spans"][0]) == words(listed["spans"])


def test_the_json_of_calibrate_has_the_keys_that_the_spec_lists() -> None:
    made = codec.decode(calibration.Calibration, bytes.fromhex(str(entry("calibration.json#calibration")["bytes"])))
    written = report.calibration_json(made, Path("file"))

    assert list(written) == list(keys_of_json("calibrate"))
    for key, cls in (("pair", calibration.Pair), ("limits", calibration.Limits), ("sample", calibration.Sample)):
        assert list(written[key]) == [name for name, _ in codec.fields_of(cls)]


def test_the_json_of_controls_has_the_keys_that_the_spec_lists() -> None:
    none = np.zeros(0)
    row = controls.Row(
        "honest", None, "", 1, 0, 0, None, None, False, 0.0, None, (), none.astype(np.float32), none
    )  # fmt: skip
    limits = thresholds.limits_for("float32", "float32")
    made = controls.Report("policy", "float32", "float32", "tools8@1", limits, True, "", 1.0, (row,))
    written = controls_report.as_json([made])
    text = of_command("controls")
    listed = keys_of_json("controls")

    assert list(written) == list(listed)
    assert list(written["reports"][0]) == re.findall(r"`(\w+)`", listed["reports"])
    assert list(written["reports"][0]["rows"][0]) == re.findall(r"`(\w+)`", text.split("\nA row, ")[1].split("\n")[0])


def test_the_json_of_an_audit_of_a_log_has_the_keys_that_the_spec_lists() -> None:
    genesis = run.Genesis("run", bytes(32), 0, (run.EnvironmentShare("tools8@1", "", 1),), bytes(32), bytes(32))
    found = run_audit.Report(genesis, Signed(b"\0", bytes(32), bytes(64)), bytes(32))
    found.add(1, "epoch 0", "is missing")
    of_audit = SPEC.split("\n    rlverify audit ")[1].split("\n## 15 ")[0]
    listed = [row[0].strip("`") for row in rows(of_audit.split("| key | value |")[1], 2)]
    written = run_report.as_json(found)

    assert list(written) == listed
    assert list(written["disagreements"][0]) == ["step", "where", "what"]


def test_the_values_of_the_example_exchange_are_the_vectors() -> None:
    text = SPEC.split("\n## 2 ")[1].split("\n## 3 ")[0]

    for reference in ("genesis.json#run_id", "policy.json#policy"):
        assert str(entry(reference)["value"]) in text
    assert str(entry("address.json#ip4")["text"]) in text
    value = entry("lease.json#lease")["value"]
    assert isinstance(value, dict)
    for slot in value["slots"]:
        assert str(slot["seed"]) in text


def test_the_index_lists_every_vector_file() -> None:
    listed = {row[0].strip("`") for row in rows(SPEC.split("\n## 15 ")[1].split("\n## A ")[0], 3)[1:]}

    assert listed == {path.name for path in VECTORS.glob("*.json")}


def test_every_vector_and_test_that_the_spec_cites_exists() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    functions = set(re.findall(r"def (test_\w+)", tests))
    cited_tests = set(re.findall(r"`(test_\w+)`", SPEC))
    cited_vectors = set(re.findall(r"`(\w+\.json#\w+)`", SPEC))

    assert len(cited_tests) >= 30 and len(cited_vectors) >= 20
    assert cited_tests - functions == set()
    for reference in cited_vectors:
        assert entry(reference), reference


def test_every_attack_has_a_defence_a_section_and_something_that_shows_it() -> None:
    table = rows(SPEC.split("\n## 13 ")[1].split("\n## 14 ")[0], 4)[1:]

    assert len(table) >= 30
    assert all(all(row) for row in table)


def test_section_numbers_that_the_code_cites_exist() -> None:
    headings = set(re.findall(r"^#{2,4} ([0-9]+(?:\.[0-9]+)*) ", SPEC, re.M))
    cited = set()
    for folder in ("protocol", "verify", "node", "trainer"):
        for path in (ROOT / folder).rglob("*.py"):
            cited |= set(re.findall(r"SPEC ([0-9]+(?:\.[0-9]+)*)", path.read_text()))

    assert cited - headings == set()


def test_sections_that_the_spec_refers_to_exist() -> None:
    headings = set(re.findall(r"^#{2,4} ([0-9]+(?:\.[0-9]+)*) ", SPEC, re.M))
    referred = set(re.findall(r"\((\d+(?:\.\d+)+)\)", SPEC)) | set(re.findall(r"\((\d+(?:\.\d+)+) step", SPEC))

    assert referred - headings == set()


def test_links_within_the_spec_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", SPEC, re.M)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    assert set(re.findall(r"\]\(#([^)]+)\)", SPEC)) - anchors == set()


def test_the_words_of_a_requirement_are_in_capitals_where_they_bind() -> None:
    for word in ("must not", "MUSTN'T", "shall"):
        assert not re.search(rf"\b{word}\b", SPEC), word
