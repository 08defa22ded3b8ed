"""Every entry of tests/vectors/*.json against protocol/, and the files against their generator.

Not here: noise.json and toploc.json, which tests of their own read (tests/verify/).
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol import (
    calibration,
    codec,
    delta,
    envelope,
    identity,
    lease,
    limits,
    log,
    messages,
    policy,
    run,
    trace,
    verdict,
)
from protocol.environments import base as environments
from protocol.errors import PolicyError, RemoteError, UsageError
from protocol.net import session

VECTORS = Path(__file__).parent.parent / "vectors"
SECTIONS = (
    "address",
    "calibration",
    "codec",
    "delta",
    "frames",
    "genesis",
    "identity",
    "lease",
    "log",
    "membership",
    "messages",
    "policy",
    "receipt",
    "seed",
    "tasks",
    "trace",
    "trace_file",
    "verdict",
)
OBJECTS = {
    name: cls
    for module in (calibration, delta, envelope, lease, log, messages, policy, run, trace, verdict)
    for name, cls in vars(module).items()
    if dataclasses.is_dataclass(cls)
}
# SPEC 8: the validity steps of an object after its encoding.
CHECKS: dict[str, Callable[[Any], None]] = {
    "Calibration": calibration.check_calibration,
    "Genesis": run.check_genesis,
    "Lease": lease.check_lease,
    "Manifest": policy.check_manifest,
    "Verdict": verdict.check_verdict,
}

Entry = dict[str, Any]


def readable(value: Any) -> Any:
    """A value as the vector files write it."""
    if dataclasses.is_dataclass(value):
        return {field.name: readable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, StrEnum):
        return str(value)
    return [readable(item) for item in value] if isinstance(value, tuple) else value


def raw(entry: Entry, key: str = "bytes") -> bytes:
    return bytes.fromhex(entry[key])


def maybe(entry: Entry, key: str) -> bytes | None:
    return None if entry.get(key) is None else raw(entry, key)


def decode(entry: Entry) -> Any:
    value = codec.decode(OBJECTS[entry["object"]], raw(entry))
    CHECKS.get(entry["object"], lambda _: None)(value)
    return value


def unseal(entry: Entry) -> Any:
    signed = codec.decode(envelope.Signed, raw(entry))
    return envelope.unseal(OBJECTS[entry["object"]], signed, signer=maybe(entry, "signer"))


def verify(entry: Entry) -> bool:
    identity.verify(raw(entry, "node"), entry["domain"].encode(), raw(entry, "payload"), raw(entry, "signature"))
    return True


def peer_id(entry: Entry) -> dict[str, str]:
    node = identity.node_from_peer_id(entry["text"])
    assert identity.peer_id(node) == entry["text"]
    return {"node": node.hex()}


def address(entry: Entry) -> Any:
    parsed = run.RunAddress.parse(entry["text"])
    assert str(parsed) == entry["text"]
    return parsed


def open_genesis(entry: Entry) -> Any:
    signed = codec.decode(envelope.Signed, raw(entry))
    return run.open_genesis(signed, run=raw(entry, "run"), trainer=maybe(entry, "trainer"))


def membership(entry: Entry) -> Any:
    signed = codec.decode(envelope.Signed, raw(entry))
    told = {name: raw(entry, name) for name in ("run", "trainer", "node")}
    return run.open_membership(signed, **told, now_ms=entry["now_ms"])


def run_id(entry: Entry) -> bytes:
    return run.run_id(envelope.Signed(raw(entry), bytes(32), bytes(64)))


def slot_seed(entry: Entry) -> int:
    return lease.slot_seed(codec.decode(lease.SeedInput, raw(entry)))


def merkle_root(entry: Entry) -> bytes:
    return policy.merkle_root([bytes.fromhex(leaf) for leaf in entry["leaves"]])


def epoch_root(entry: Entry) -> bytes:
    return log.epoch_root(codec.decode(log.EpochLog, raw(entry)))


def negotiate(entry: Entry) -> Any:
    theirs = tuple(messages.Version(**each) for each in entry["theirs"])
    return messages.negotiate(theirs, messages.Version(**entry["ours"]), their_name="they", our_name="we")


def message(entry: Entry) -> Any:
    opened = messages.open_body(raw(entry))
    assert messages.pack(opened) == raw(entry)
    return opened


def payload(entry: Entry) -> dict[str, Any]:
    """SPEC 9.1: length, kind, id, body."""
    frame = raw(entry)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    kind, number, body = session._split(frame[4:])
    return {"kind": int(kind), "id": number, "body": body.hex()}


def error_body(entry: Entry) -> dict[str, str]:
    refused = session.decode_error(raw(entry))
    if "value" in entry and "message" not in entry["value"]:
        return {"code": str(refused.code)}
    assert session.encode_error(refused) == raw(entry)
    return {"code": str(refused.code), "message": str(refused)}


def prompt(entry: Entry) -> Any:
    return environments.load(entry["environment"]).prompt(entry["index"])


def step(entry: Entry) -> str | None:
    return environments.load(entry["environment"]).step(entry["index"], tuple(entry["replies"]))


def reward(entry: Entry) -> float:
    return environments.load(entry["environment"]).reward(entry["index"], tuple(entry["replies"]))


def policy_root(entry: Entry, folder: Path) -> bytes:
    for name, content in entry["files"].items():
        (folder / name).write_bytes(bytes.fromhex(content))
    return policy.policy_root(folder)


def delta_tensor(entry: Entry) -> bytes:
    base = np.frombuffer(raw(entry, "base"), dtype="<u2")
    return delta.decode(base, raw(entry), base.size).tobytes()


def delta_policy(entry: Entry) -> dict[str, str]:
    base = {
        name: delta.BaseTensor(each["dtype"], tuple(each["shape"]), np.frombuffer(raw(each, "raw"), dtype=np.uint8))
        for name, each in entry["base"].items()
    }
    reader = delta.DeltaReader([raw(entry)], most_bytes=entry["most"])
    written = {tensor.leaf.name: "" for tensor in reader.table.tensors}
    for section in reader.sections(base.get):
        assert section.begin == len(written[section.tensor.leaf.name]) // 2
        written[section.tensor.leaf.name] += section.raw.tobytes().hex()
    return written


OPERATIONS: dict[str, Callable[[Entry], Any]] = {
    each.__name__: each
    for each in (
        decode,
        unseal,
        verify,
        peer_id,
        address,
        open_genesis,
        membership,
        run_id,
        slot_seed,
        merkle_root,
        epoch_root,
        delta_tensor,
        delta_policy,
        negotiate,
        message,
        payload,
        error_body,
        prompt,
        step,
        reward,
    )
}


def answer(entry: Entry, folder: Path) -> Any:
    if entry["op"] == "policy_root":
        return policy_root(entry, folder)
    return OPERATIONS[entry["op"]](entry)


def entries(side: str) -> list[Any]:
    found = []
    for section in SECTIONS:
        content = json.loads((VECTORS / f"{section}.json").read_text())
        found += [pytest.param(entry, id=f"{section}-{entry['name']}") for entry in content[side]]
    return found


@pytest.mark.parametrize("entry", entries("valid"))
def test_a_valid_vector_gives_its_value(entry: Entry, tmp_path: Path) -> None:
    value = answer(entry, tmp_path)

    assert readable(value) == entry["value"]
    if entry["op"] == "decode":
        assert codec.encode(value) == raw(entry)


@pytest.mark.parametrize("entry", entries("invalid"))
def test_an_invalid_vector_is_refused_with_its_code(entry: Entry, tmp_path: Path) -> None:
    with pytest.raises((RemoteError, UsageError, PolicyError)) as caught:
        answer(entry, tmp_path)

    error = caught.value
    if isinstance(error, RemoteError):
        assert str(error.code) == entry["error"], error
    else:
        assert entry["error"] == ("USAGE" if isinstance(error, UsageError) else "POLICY"), error
    assert str(error)


def test_the_vector_files_are_what_the_generator_writes() -> None:
    done = subprocess.run(
        [sys.executable, str(VECTORS / "generate.py"), "--check"], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_object_on_the_wire_has_a_vector() -> None:
    seen = {entry.values[0].get("object") for entry in entries("valid")}
    signed = {name for name, cls in OBJECTS.items() if hasattr(cls, "DOMAIN")}
    sent = {cls.__name__ for cls in messages.MESSAGES.values()}

    assert signed | sent <= seen


def test_the_protocol_version_of_the_vectors_is_the_code_s() -> None:
    major, minor = limits.PROTOCOL_VERSION
    for section in SECTIONS:
        assert json.loads((VECTORS / f"{section}.json").read_text())["spec"] == f"{major}.{minor}", section
