"""The run that every vector is about: fixed keys, fixed times, a policy of two tensors, and one trace.

Not here: faults (section.py).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import wire

TRAINER = wire.Key(bytes(range(32)))
NODE = wire.Key(bytes(range(32, 64)))
STRANGER = wire.Key(bytes(range(64, 96)))
T0 = 1_767_225_600_000  # 2026-01-01T00:00:00Z


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def safetensors(tensors: dict[str, tuple[str, list[int], bytes]]) -> bytes:
    table, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return with_header(json.dumps(table, separators=(",", ":")).encode(), data)


def with_header(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


EMBEDDING = ("BF16", [4, 2], bytes.fromhex("803f0040404080400000003f80bf00c0"))
NORM = ("BF16", [2], bytes.fromhex("803f803f"))
CONFIG = b'{"vocab_size": 4, "hidden_size": 2}\n'
TOKENIZER = b'{"model": {}}\n'
POLICY_FILES = {
    "config.json": CONFIG,
    "model.safetensors": safetensors({"embed.weight": EMBEDDING, "norm.weight": NORM}),
    "tokenizer.json": TOKENIZER,
}


def merkle(leaves: list[bytes]) -> bytes:
    """Hashes level by level, an odd last node moves up: another road to SPEC 8.3.2's root."""
    level = [sha256(b"\0" + leaf) for leaf in leaves]
    while len(level) > 1:
        paired = [sha256(b"\1" + level[i] + level[i + 1]) for i in range(0, len(level) - 1, 2)]
        level = paired + level[len(paired) * 2 :]
    return level[0]


def tensor_leaf(name: str, tensor: tuple[str, list[int], bytes]) -> bytes:
    dtype, shape, raw = tensor
    return wire.encode("TensorLeaf", {"name": name, "dtype": dtype, "shape": shape, "digest": sha256(raw)})


def file_leaf(name: str, content: bytes) -> bytes:
    return wire.encode("FileLeaf", {"name": name, "digest": sha256(content)})


POLICY_LEAVES = [
    tensor_leaf("embed.weight", EMBEDDING),
    tensor_leaf("norm.weight", NORM),
    file_leaf("config.json", CONFIG),
    file_leaf("tokenizer.json", TOKENIZER),
]
ROOT = merkle(POLICY_LEAVES)

GENESIS = {
    "name": "example",
    "trainer": TRAINER.public,
    "created_ms": T0,
    "environments": [{"name": "tools8@1", "parameters": "", "weight": 1}],
    "first_policy_root": ROOT,
    "audit_anchor": sha256(b"anchor"),
}
RUN = sha256(wire.encode("Genesis", GENESIS))
GROUP_ID = bytes.fromhex("67726f75702d303030303030303030301f")[:16]
LEASE_ID = bytes.fromhex("6c656173652d30303030303030303030")
SECRET = bytes([0x5E]) * 32


def seed_input(slot: int) -> dict[str, Any]:
    return {
        "run": RUN,
        "policy_root": ROOT,
        "environment": "tools8@1",
        "parameters": "",
        "task_index": 41,
        "group_id": GROUP_ID,
        "slot": slot,
        "secret": SECRET,
    }


def slot_seed(slot: int) -> int:
    data = wire.encode("SeedInput", seed_input(slot))
    digest = hashlib.blake2b(data, digest_size=64, person=b"rlcommons-seed-1").digest()
    return int.from_bytes(digest[:8], "little")


LEASE = {
    "run": RUN,
    "lease_id": LEASE_ID,
    "node": NODE.public,
    "policy_version": 0,
    "policy_root": ROOT,
    "environment": "tools8@1",
    "parameters": "",
    "task_index": 41,
    "group_id": GROUP_ID,
    "group_size": 8,
    "slots": [{"index": 0, "seed": slot_seed(0)}, {"index": 3, "seed": slot_seed(3)}],
    "prompt": [1, 0, 2],
    "temperature": 1.0,
    "max_turn_tokens": 16,
    "max_tokens": 48,
    "issued_ms": T0 + 60_000,
    "deadline_ms": T0 + 180_000,
}
ENGINE = {
    "name": "transformers",
    "version": "5.0.0",
    "dtype": "float32",
    "device": "cpu",
    "runner": "reference",
}
TRACE = {
    "run": RUN,
    "lease_id": LEASE_ID,
    "node": NODE.public,
    "policy_version": 0,
    "policy_root": ROOT,
    "slot": 3,
    "tokens": [2, 1, 3, 0, 2, 1, 3],
    "spans": [{"kind": 0, "length": 3}, {"kind": 1, "length": 2}, {"kind": 0, "length": 2}],
    "logprobs": [-0.5, -1.25, -0.0625, -2.0, -0.125],
    "proofs": [bytes.fromhex("ffd9") + bytes(range(1, 21))],
    "reward": 1.0,
    "engine": ENGINE,
    "started_ms": T0 + 61_000,
    "finished_ms": T0 + 62_500,
}
TRACE_DIGEST = sha256(wire.encode("Trace", TRACE))
RECEIPT = {
    "run": RUN,
    "trace_digest": TRACE_DIGEST,
    "lease_id": LEASE_ID,
    "slot": 3,
    "node": NODE.public,
    "received_ms": T0 + 63_000,
    "sequence": 7,
}
MEMBERSHIP = {"run": RUN, "node": NODE.public, "expires_ms": T0 + 7 * 86_400_000}
VERDICT = {
    "run": RUN,
    "trace_digest": TRACE_DIGEST,
    "lease_id": LEASE_ID,
    "slot": 3,
    "node": NODE.public,
    "policy_version": 0,
    "policy_root": ROOT,
    "outcome": "ACCEPTED",
    "reason": None,
    "audited": True,
    "reward": 1.0,
    "checks": [
        {
            "name": "margin",
            "outcome": "PASSED",
            "reason": None,
            "value": 0.0,
            "limit": 0.01,
            "start": None,
            "end": None,
            "detail": "",
        }
    ],
    "calibration": None,
    "scores": [],
    "verifier": {"software": "0.1.0", "engine": "transformers 5.0.0", "dtype": "float32", "device": "cpu"},
    "judged_ms": T0 + 70_000,
}
CALIBRATION = {
    "run": RUN,
    "policy_version": 0,
    "policy_root": ROOT,
    "pair": {
        "worker_engine": "transformers",
        "worker_dtype": "float32",
        "worker_device": "cpu",
        "verifier_engine": "transformers",
        "verifier_dtype": "float32",
        "verifier_device": "cpu",
    },
    "limits": {
        "margin_hard": 0.01,
        "margin_budget": 0.0,
        "exponent_mismatches": 8.0,
        "sign_mismatches": 8.0,
        "mantissa_mean": 0.15,
        "mantissa_median": 0.5,
        "logprob_tolerance": 0.01,
    },
    "margins": {
        "edges": [0.0, 0.02, 0.5],
        "alternatives": [
            {"name": "noise 4", "scores": [-0.125, 0.5, 1.0, 1.5]},
            {"name": "unseeded", "scores": [-0.75, 2.5, 4.5, 5.0]},
        ],
    },
    "proofs": {"edges": [0.0625, 0.25], "alternatives": [{"name": "times 2", "scores": [-2.0, 1.25, 5.0]}]},
    "sample": {
        "traces": 32,
        "tokens": 2048,
        "chunks": 64,
        "mismatches": 1,
        "sigma": 0.0009765625,
        "margins": [0.0, 0.0, 0.0, 0.0, 0.0009765625],
        "logprobs": [0.0, 0.0, 0.0, 0.0, 0.0009765625],
        "exponents": [0.0, 0.0, 0.0, 0.0, 1.0],
        "mantissa_means": [0.0, 0.0, 0.0, 0.015625, 0.015625],
        "mantissa_medians": [0.0, 0.0, 0.0, 0.0, 0.0],
        "int8_nats": 4.5,
    },
    "created_ms": T0 + 50_000,
}
MANIFEST = {
    "run": RUN,
    "version": 0,
    "root": ROOT,
    "files": [
        {"name": name, "blobs": [{"digest": sha256(content), "length": len(content)}]}
        for name, content in POLICY_FILES.items()
    ],
    "created_ms": T0,
    "expires_ms": T0 + 86_400_000,
    "deltas": [],
}
DELTA = {
    "base_version": 6,
    "base_root": sha256(b"the policy before"),
    "codec": "ULPD1",
    "blobs": [{"digest": sha256(b"a delta"), "length": 7}],
}


def heartbeat() -> dict[str, Any]:
    return {
        "clock_ms": T0,
        "policy_version": 0,
        "tokens_per_second": 12.5,
        "slots_busy": 2,
        "slots_total": 16,
        "slots_waiting": 3,
        "cache_percent": 40,
        "unsent_traces": 0,
        "verdict_cursor": 7,
    }


TIMING = {"waited_ms": 120, "slot_ms": 30, "prefill_ms": 45, "decode_ms": 1_100, "tool_ms": 300}


def messages_of_the_run() -> dict[str, dict[str, Any]]:
    manifest = wire.seal(TRAINER, "Manifest", MANIFEST)
    return {
        "Hello": {
            "versions": [{"major": 1, "minor": 0}],
            "run": RUN,
            "software": "rlcommons 0.1.0",
            "clock_ms": T0,
            "engine": ENGINE,
        },
        "Welcome": {
            "version": {"major": 1, "minor": 0},
            "software": "rlcommons 0.1.0",
            "genesis": wire.seal(TRAINER, "Genesis", GENESIS),
            "manifest": manifest,
            "clock_ms": T0,
        },
        "GetManifest": {"version": 0},
        "ManifestReply": {"manifest": manifest},
        "Announce": {"manifest": manifest},
        "GetLeases": {"slots": 16, "versions": [0]},
        "LeasesReply": {"leases": [wire.seal(TRAINER, "Lease", LEASE)], "retry_ms": 0, "cause": ""},
        "ReturnLease": {"lease_id": LEASE_ID, "cause": "shutting down"},
        "Returned": {},
        "Submit": {"trace": wire.seal(NODE, "Trace", TRACE), "timing": TIMING},
        "Submitted": {"receipt": wire.seal(TRAINER, "Receipt", RECEIPT), "verdict": None},
        "Heartbeat": heartbeat(),
        "HeartbeatReply": {
            "clock_ms": T0,
            "latest_version": 0,
            "verdicts": [wire.seal(TRAINER, "Verdict", VERDICT)],
            "verdict_cursor": 8,
        },
        "GetBlob": {"digest": sha256(CONFIG)},
        "BlobReply": {"data": CONFIG},
        "AskAudit": {"digest": TRACE_DIGEST},
        "AuditAsked": {"granted": True, "text": "another auditor looks at it"},
        "GetPeers": {
            "version": 0,
            "addresses": ["/ip4/203.0.113.9/tcp/4002"],
            "versions": [],
            "about": [NODE.public],
            "membership": None,
        },
        "PeersReply": {
            "peers": [{"node": NODE.public, "addresses": ["/ip4/203.0.113.7/tcp/4001"], "versions": [0]}],
            "membership": wire.seal(TRAINER, "Membership", MEMBERSHIP),
        },
        "GetHaves": {"digests": [sha256(CONFIG), sha256(b"")]},
        "Haves": {"bitmap": b"\x80"},
        "Have": {"digests": [sha256(CONFIG)], "coming": [sha256(b"")]},
    }
