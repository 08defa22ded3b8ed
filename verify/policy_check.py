"""Is a folder the policy that a signed manifest names: signature, expiry, every file, and the root, offline.

Not here: how a manifest or a folder is read (protocol/policy.py), and whether the policy is any good.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protocol import codec, identity
from protocol.envelope import Signed, unseal
from protocol.errors import Code, DecodeError, PolicyError, RemoteError, UsageError
from protocol.limits import MAX_MANIFEST_BYTES
from protocol.outputs import cause, printable
from protocol.policy import Manifest, PolicyFile, check_manifest, describe, policy_root

_MOST_BYTES = MAX_MANIFEST_BYTES + 4_096  # with its signature
_GIVE = "give manifests/NNNNNN.msgpack of a mirror"


@dataclass(frozen=True, slots=True)
class Finding:
    """One check; `detail` for people."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """`manifest` is None when it is not a valid one of that trainer: then nothing more was checked."""

    signer: bytes
    manifest: Manifest | None
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        return all(finding.passed for finding in self.findings)


def read_manifest(path: Path) -> Signed:
    """A file as a mirror has it. Raises UsageError when it is no signed object."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {cause(error)}: {_GIVE}") from None
    if len(data) > _MOST_BYTES:
        raise UsageError(f"{path} is longer than any manifest: {_GIVE}")
    try:
        return codec.decode(Signed, data)
    except DecodeError as error:
        raise UsageError(f"{path} is not a signed manifest ({error}): {_GIVE}") from None


def check_policy(folder: Path, signed: Signed, *, trainer: bytes | None, now_ms: int) -> PolicyReport:
    """Hold a folder against a manifest; trainer: whose it must be, None for whoever signed it.

    Raises PolicyError for a folder that is no policy at all.
    """
    whose = identity.peer_id(signed.signer)
    try:
        manifest = unseal(Manifest, signed, signer=trainer)
        check_manifest(manifest)
    except RemoteError as error:
        name = "signature" if error.code == Code.BAD_SIGNATURE else "manifest"
        return PolicyReport(signed.signer, None, (Finding(name, False, f"{error} (signed by {whose})"),))
    asked = "" if trainer is not None else "; give --trainer to say whose it must be"
    findings = [
        Finding("signature", True, f"signed by {whose}{asked}"),
        _expiry(manifest, now_ms),
        *_files(folder, manifest.files),
        _root(folder, manifest.root),
    ]
    return PolicyReport(signed.signer, manifest, tuple(findings))


def _expiry(manifest: Manifest, now_ms: int) -> Finding:
    # SPEC 8.3.4: a manifest that comes from anyone but the trainer, in a session, is ignored after expires_ms.
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(manifest.expires_ms, 2**40 * 100) / 1000))
    if manifest.expires_ms <= now_ms:
        return Finding("expiry", False, f"it was valid until {until}: ask for a newer one")
    return Finding("expiry", True, f"valid until {until}")


def _files(folder: Path, named: tuple[PolicyFile, ...]) -> Iterator[Finding]:
    found = {file.name: file for file in describe(folder)}
    for file in named:
        here = found.pop(file.name, None)
        if here is None:
            yield Finding("file", False, f"{file.name} is missing")
        elif here != file:
            yield Finding("file", False, f"{file.name} {_difference(here, file)}")
        else:
            yield Finding("file", True, f"{file.name}, {file.size:,} bytes")
    for name in found:
        yield Finding("file", False, f"{name} is not in the manifest")


def _difference(here: PolicyFile, named: PolicyFile) -> str:
    if here.size != named.size:
        return f"has {here.size:,} bytes, the manifest says {named.size:,}"
    place = next(i for i, (ours, theirs) in enumerate(zip(here.blobs, named.blobs, strict=True)) if ours != theirs)
    return f"differs in its piece {place} (from byte {sum(blob.length for blob in named.blobs[:place]):,})"


def _root(folder: Path, named: bytes) -> Finding:
    try:
        root = policy_root(folder)
    except PolicyError as error:
        return Finding("root", False, str(error))
    if root != named:
        return Finding("root", False, f"{root.hex()}, the manifest says {named.hex()}")
    return Finding("root", True, root.hex())


def as_json(report: PolicyReport) -> dict[str, Any]:
    """SPEC 14."""
    manifest = report.manifest
    return {
        "spec": "1.0",
        "trainer": identity.peer_id(report.signer),
        "run": None if manifest is None else manifest.run.hex(),
        "version": None if manifest is None else manifest.version,
        "root": None if manifest is None else manifest.root.hex(),
        "agrees": report.passed,
        "checks": [{"name": each.name, "passed": each.passed, "detail": each.detail} for each in report.findings],
    }


def as_text(report: PolicyReport) -> str:
    """For people."""
    lines = [
        printable(f"  {'ok  ' if each.passed else 'FAIL'}  {each.name:<9}  {each.detail}") for each in report.findings
    ]
    if report.manifest is None:
        return "\n".join(["this is not a manifest of that trainer", *lines])
    about = f"policy {report.manifest.version} of run {report.manifest.run.hex()[:16]}…"
    return "\n".join([f"the folder is {about}" if report.passed else f"this is not {about} as signed", *lines])
