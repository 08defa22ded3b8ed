"""SPEC.md's encoding a second time, in the plainest way, so that vectors do not come from the code they test.

Layouts repeat the field tables of SPEC 8 and 9 in the SPEC's words. Not here: any import of rlcommons.
"""

from __future__ import annotations

import struct
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

NIL, FALSE, TRUE = b"\xc0", b"\xc2", b"\xc3"

# key → type. "X?" may be nil; "[X]" is a list; a capital letter begins the name of another object.
LAYOUTS: dict[str, dict[str, str]] = {
    "Signed": {"payload": "bytes", "signer": "bytes", "signature": "bytes"},
    "EnvironmentShare": {"name": "text", "parameters": "text", "weight": "uint"},
    "Genesis": {
        "name": "text",
        "trainer": "bytes",
        "created_ms": "uint",
        "environments": "[EnvironmentShare]",
        "first_policy_root": "bytes",
        "audit_anchor": "bytes",
    },
    "Membership": {"run": "bytes", "node": "bytes", "expires_ms": "uint"},
    "Blob": {"digest": "bytes", "length": "uint"},
    "PolicyFile": {"name": "text", "blobs": "[Blob]"},
    "Delta": {"base_version": "uint", "base_root": "bytes", "codec": "text", "blobs": "[Blob]"},
    "Manifest": {
        "run": "bytes",
        "version": "uint",
        "root": "bytes",
        "files": "[PolicyFile]",
        "created_ms": "uint",
        "expires_ms": "uint",
        "deltas": "[Delta]",
    },
    "TensorLeaf": {"name": "text", "dtype": "text", "shape": "[uint]", "digest": "bytes"},
    "FileLeaf": {"name": "text", "digest": "bytes"},
    "DeltaTensor": {"leaf": "TensorLeaf", "size": "uint"},
    "DeltaTable": {"tensors": "[DeltaTensor]"},
    "Slot": {"index": "uint", "seed": "uint"},
    "Lease": {
        "run": "bytes",
        "lease_id": "bytes",
        "node": "bytes",
        "policy_version": "uint",
        "policy_root": "bytes",
        "environment": "text",
        "parameters": "text",
        "task_index": "uint",
        "group_id": "bytes",
        "group_size": "uint",
        "slots": "[Slot]",
        "prompt": "tokens",
        "temperature": "real",
        "max_turn_tokens": "uint",
        "max_tokens": "uint",
        "issued_ms": "uint",
        "deadline_ms": "uint",
    },
    "SeedInput": {
        "run": "bytes",
        "policy_root": "bytes",
        "environment": "text",
        "parameters": "text",
        "task_index": "uint",
        "group_id": "bytes",
        "slot": "uint",
        "secret": "bytes",
    },
    "Span": {"kind": "uint", "length": "uint"},
    "EngineDescriptor": {
        "name": "text",
        "version": "text",
        "dtype": "text",
        "device": "text",
        "runner": "text",
    },
    "Trace": {
        "run": "bytes",
        "lease_id": "bytes",
        "node": "bytes",
        "policy_version": "uint",
        "policy_root": "bytes",
        "slot": "uint",
        "tokens": "tokens",
        "spans": "[Span]",
        "logprobs": "floats",
        "proofs": "[bytes]",
        "reward": "real",
        "engine": "EngineDescriptor",
        "started_ms": "uint",
        "finished_ms": "uint",
    },
    "Receipt": {
        "run": "bytes",
        "trace_digest": "bytes",
        "lease_id": "bytes",
        "slot": "uint",
        "node": "bytes",
        "received_ms": "uint",
        "sequence": "uint",
    },
    "Check": {
        "name": "text",
        "outcome": "text",
        "reason": "text?",
        "value": "real?",
        "limit": "real?",
        "start": "uint?",
        "end": "uint?",
        "detail": "text",
    },
    "Fingerprint": {"software": "text", "engine": "text", "dtype": "text", "device": "text"},
    "Verdict": {
        "run": "bytes",
        "trace_digest": "bytes",
        "lease_id": "bytes",
        "slot": "uint",
        "node": "bytes",
        "policy_version": "uint",
        "policy_root": "bytes",
        "outcome": "text",
        "reason": "text?",
        "audited": "flag",
        "reward": "real?",
        "checks": "[Check]",
        "calibration": "bytes?",
        "scores": "[real]",
        "verifier": "Fingerprint",
        "judged_ms": "uint",
    },
    "TraceFile": {
        "genesis": "Signed",
        "lease": "Signed",
        "trace": "Signed",
        "receipt": "Signed?",
        "verdict": "Signed?",
        "calibration": "Signed?",
    },
    "Pair": {
        "worker_engine": "text",
        "worker_dtype": "text",
        "worker_device": "text",
        "verifier_engine": "text",
        "verifier_dtype": "text",
        "verifier_device": "text",
    },
    "Limits": {
        "margin_hard": "real",
        "margin_budget": "real",
        "exponent_mismatches": "real",
        "sign_mismatches": "real",
        "mantissa_mean": "real",
        "mantissa_median": "real",
        "logprob_tolerance": "real",
    },
    "Alternative": {"name": "text", "scores": "[real]"},
    "ScoreTable": {"edges": "[real]", "alternatives": "[Alternative]"},
    "Sample": {
        "traces": "uint",
        "tokens": "uint",
        "chunks": "uint",
        "mismatches": "uint",
        "sigma": "real",
        "margins": "[real]",
        "logprobs": "[real]",
        "exponents": "[real]",
        "mantissa_means": "[real]",
        "mantissa_medians": "[real]",
        "int8_nats": "real",
    },
    "Calibration": {
        "run": "bytes",
        "policy_version": "uint",
        "policy_root": "bytes",
        "pair": "Pair",
        "limits": "Limits",
        "margins": "ScoreTable",
        "proofs": "ScoreTable",
        "sample": "Sample",
        "created_ms": "uint",
    },
    "Draw": {"seen": "uint", "floor": "real", "rate": "real", "drawn": "flag", "trusted": "uint?"},
    "Submission": {"receipt": "Signed", "draw": "Draw?"},
    "LoggedVerdict": {"sequence": "uint", "verdict": "Signed"},
    "Epoch": {
        "run": "bytes",
        "version": "uint",
        "root": "bytes",
        "calibrations": "uint",
        "leases": "uint",
        "submissions": "uint",
        "verdicts": "uint",
        "audit_value": "bytes",
        "previous": "bytes",
        "closed_ms": "uint",
    },
    "EpochLog": {
        "manifest": "Signed",
        "calibrations": "[Signed]",
        "leases": "[Signed]",
        "submissions": "[Submission]",
        "verdicts": "[LoggedVerdict]",
        "epoch": "Signed?",
    },
    "Version": {"major": "uint", "minor": "uint"},
    "Hello": {
        "versions": "[Version]",
        "run": "bytes",
        "software": "text",
        "clock_ms": "uint",
        "engine": "EngineDescriptor",
    },
    "Welcome": {
        "version": "Version",
        "software": "text",
        "genesis": "Signed",
        "manifest": "Signed",
        "clock_ms": "uint",
    },
    "GetManifest": {"version": "uint?"},
    "ManifestReply": {"manifest": "Signed"},
    "Announce": {"manifest": "Signed"},
    "GetLeases": {"slots": "uint", "versions": "[uint]"},
    "LeasesReply": {"leases": "[Signed]", "retry_ms": "uint", "cause": "text"},
    "ReturnLease": {"lease_id": "bytes", "cause": "text"},
    "Returned": {},
    "Submit": {"trace": "Signed", "timing": "Timing?"},
    "Timing": {
        "waited_ms": "uint",
        "slot_ms": "uint",
        "prefill_ms": "uint",
        "decode_ms": "uint",
        "tool_ms": "uint",
    },
    "Submitted": {"receipt": "Signed?", "verdict": "Signed?"},
    "Heartbeat": {
        "clock_ms": "uint",
        "policy_version": "uint?",
        "tokens_per_second": "real",
        "slots_busy": "uint",
        "slots_total": "uint",
        "slots_waiting": "uint",
        "cache_percent": "uint?",
        "unsent_traces": "uint",
        "verdict_cursor": "uint",
    },
    "HeartbeatReply": {
        "clock_ms": "uint",
        "latest_version": "uint",
        "verdicts": "[Signed]",
        "verdict_cursor": "uint",
    },
    "GetBlob": {"digest": "bytes"},
    "BlobReply": {"data": "bytes"},
    "AskAudit": {"digest": "bytes"},
    "AuditAsked": {"granted": "flag", "text": "text"},
    "Peer": {"node": "bytes", "addresses": "[text]", "versions": "[uint]"},
    "GetPeers": {
        "version": "uint?",
        "addresses": "[text]",
        "versions": "[uint]",
        "about": "[bytes]",
        "membership": "Signed?",
    },
    "PeersReply": {"peers": "[Peer]", "membership": "Signed?"},
    "GetHaves": {"digests": "[bytes]"},
    "Haves": {"bitmap": "bytes"},
    "Have": {"digests": "[bytes]", "coming": "[bytes]"},
}

DOMAINS = {
    "Genesis": b"rlcommons/genesis/1",
    "Manifest": b"rlcommons/manifest/1",
    "Lease": b"rlcommons/lease/1",
    "Trace": b"rlcommons/trace/1",
    "Receipt": b"rlcommons/receipt/1",
    "Verdict": b"rlcommons/verdict/1",
    "Calibration": b"rlcommons/calibration/1",
    "Epoch": b"rlcommons/epoch/1",
    "Membership": b"rlcommons/membership/1",
}

NUMBERS = {
    "Hello": 1,
    "Welcome": 2,
    "GetManifest": 3,
    "ManifestReply": 4,
    "Announce": 5,
    "GetLeases": 6,
    "LeasesReply": 7,
    "ReturnLease": 8,
    "Returned": 9,
    "Submit": 10,
    "Submitted": 11,
    "Heartbeat": 12,
    "HeartbeatReply": 13,
    "GetBlob": 14,
    "BlobReply": 15,
    "AskAudit": 16,
    "AuditAsked": 17,
    "GetPeers": 18,
    "PeersReply": 19,
    "GetHaves": 20,
    "Haves": 21,
    "Have": 22,
}


# --- msgpack, shortest forms ---


def uint(number: int) -> bytes:
    if number < 128:
        return bytes([number])
    for mark, size in ((0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        if number < 1 << (8 * size):
            return bytes([mark]) + number.to_bytes(size, "big")
    raise ValueError(number)


def real(number: float) -> bytes:
    return b"\xcb" + struct.pack(">d", number)


def text(value: str) -> bytes:
    raw = value.encode()
    if len(raw) < 32:
        return bytes([0xA0 | len(raw)]) + raw
    return _long(raw, 0xD9)


def blob(value: bytes) -> bytes:
    return _long(value, 0xC4)


def _long(raw: bytes, first_mark: int) -> bytes:
    for step, size in enumerate((1, 2, 4)):
        if len(raw) < 1 << (8 * size):
            return bytes([first_mark + step]) + len(raw).to_bytes(size, "big") + raw
    raise ValueError(len(raw))


def array_head(count: int) -> bytes:
    if count < 16:
        return bytes([0x90 | count])
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")


def array(items: list[bytes]) -> bytes:
    return array_head(len(items)) + b"".join(items)


def mapping(pairs: list[tuple[str, bytes]]) -> bytes:
    head = bytes([0x80 | len(pairs)]) if len(pairs) < 16 else b"\xde" + len(pairs).to_bytes(2, "big")
    return head + b"".join(text(key) + value for key, value in pairs)


# --- objects ---


def field(kind: str, value: Any) -> bytes:
    if kind.endswith("?"):
        return NIL if value is None else field(kind[:-1], value)
    if kind.startswith("["):
        return array([field(kind[1:-1], item) for item in value])
    if kind[0].isupper():
        return encode(kind, value)
    if kind == "flag":
        return TRUE if value else FALSE
    if kind == "tokens":
        return blob(b"".join(struct.pack("<I", token) for token in value))
    if kind == "floats":
        return blob(b"".join(struct.pack("<f", number) for number in value))
    return {"uint": uint, "real": real, "text": text, "bytes": blob}[kind](value)


def pairs(name: str, value: dict[str, Any]) -> list[tuple[str, bytes]]:
    """Key and encoded value of each field, in order: what a hand-made fault starts from."""
    layout = LAYOUTS[name]
    if list(value) != list(layout):
        raise ValueError(f"{name} has the keys {list(layout)}, not {list(value)}")
    return [(key, field(kind, value[key])) for key, kind in layout.items()]


def encode(name: str, value: dict[str, Any]) -> bytes:
    return mapping(pairs(name, value))


# --- signatures ---


class Key:
    def __init__(self, private: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private)
        self.private = private
        self.public = self._key.public_key().public_bytes_raw()

    def sign(self, domain: bytes, payload: bytes) -> bytes:
        return self._key.sign(bytes([len(domain)]) + domain + payload)


def seal(key: Key, name: str, value: dict[str, Any], domain: bytes | None = None) -> dict[str, bytes]:
    payload = encode(name, value)
    return {
        "payload": payload,
        "signer": key.public,
        "signature": key.sign(DOMAINS[name] if domain is None else domain, payload),
    }


_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def base58(data: bytes) -> str:
    number, digits = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


def peer_id(public: bytes) -> str:
    return base58(bytes.fromhex("002408011220") + public)
