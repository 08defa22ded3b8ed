"""Writes the test vectors: `python tests/vectors/generate.py` rewrites them, `--check` says whether they differ.

Deterministic: fixed keys, fixed times. Bytes come from wire.py, the SPEC's encoding written a second time, and
faults are made by hand from its parts. Not here: running them (tests/protocol/test_vectors.py).

An entry names an `op`, its inputs, and either `value` (what a correct implementation answers) or `error` (the
exact code). Bytes are hex; a u64 is a plain JSON integer: read it with a parser that keeps 64 bits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import wire

HERE = Path(__file__).resolve().parent
SPEC = "1.0"

TRAINER = wire.Key(bytes(range(32)))
NODE = wire.Key(bytes(range(32, 64)))
STRANGER = wire.Key(bytes(range(64, 96)))
T0 = 1_767_225_600_000  # 2026-01-01T00:00:00Z
SMALL_ORDER = {
    "1": b"\1" + bytes(31),
    "2": b"\xec" + b"\xff" * 30 + b"\x7f",
    "4": bytes(32),
    "4_sign": bytes(31) + b"\x80",
    "4_not_reduced": b"\xed" + b"\xff" * 30 + b"\x7f",
    "1_not_reduced": b"\xee" + b"\xff" * 30 + b"\x7f",
    "8": bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    "8_other": bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
}
GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493  # of Ed25519

Entry = dict[str, Any]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: readable(item) for key, item in value.items()}
    return [readable(item) for item in value] if isinstance(value, list | tuple) else value


class Section:
    """One vector file in the making."""

    def __init__(self, number: str) -> None:
        self.number = number
        self.valid: list[Entry] = []
        self.invalid: list[Entry] = []

    def good(self, op: str, name: str, comment: str, *, value: Any, **inputs: Any) -> None:
        entry = {"name": name, "comment": comment, "op": op, **inputs, "value": value}
        self.valid.append(readable(entry))

    def bad(self, op: str, name: str, comment: str, error: str, **inputs: Any) -> None:
        self.invalid.append(readable({"name": name, "comment": comment, "op": op, **inputs, "error": error}))

    def object(self, kind: str, name: str, comment: str, value: dict[str, Any]) -> bytes:
        data = wire.encode(kind, value)
        self.good("decode", name, comment, object=kind, bytes=data, value=value)
        return data

    def content(self) -> dict[str, Any]:
        names = [entry["name"] for entry in self.valid + self.invalid]
        repeated = {name for name in names if names.count(name) > 1}
        if repeated:
            raise ValueError(f"section {self.number} uses a name twice: {repeated}")
        return {"spec": SPEC, "section": self.number, "valid": self.valid, "invalid": self.invalid}


# --- faults made by hand, from the encoded parts of a good object ---


def with_raw(kind: str, value: dict[str, Any], key: str, raw: bytes) -> bytes:
    """The object with one field's encoded value replaced."""
    return wire.mapping([(k, raw if k == key else v) for k, v in wire.pairs(kind, value)])


def without(kind: str, value: dict[str, Any], key: str) -> bytes:
    return wire.mapping([(k, v) for k, v in wire.pairs(kind, value) if k != key])


def plus(kind: str, value: dict[str, Any], key: str, raw: bytes) -> bytes:
    return wire.mapping([*wire.pairs(kind, value), (key, raw)])


def swapped(kind: str, value: dict[str, Any]) -> bytes:
    first, second, *rest = wire.pairs(kind, value)
    return wire.mapping([second, first, *rest])


def wide_uint(number: int) -> bytes:
    return b"\xcf" + number.to_bytes(8, "big")


def unknown_field(section: Section, kind: str, value: dict[str, Any]) -> None:
    """The faults every object shares: one of each a kind of object."""
    lower = kind.lower()
    first = next(iter(wire.LAYOUTS[kind]))
    cases = (
        (f"{lower}_unknown_key", "a field no table lists", "MALFORMED", plus(kind, value, "zz", wire.uint(1))),
        (f"{lower}_missing_key", f"'{first}' left out", "MALFORMED", without(kind, value, first)),
        (f"{lower}_swapped_keys", "the first two fields in the other order", "NOT_CANONICAL", swapped(kind, value)),
        (f"{lower}_trailing_byte", "one byte follows", "MALFORMED", wire.encode(kind, value) + b"\xc0"),
        (f"{lower}_cut_off", "the last byte is missing", "MALFORMED", wire.encode(kind, value)[:-1]),
    )
    for name, comment, error, data in cases:
        section.bad("decode", name, comment, error, object=kind, bytes=data)


# --- the example run every section uses ---


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
    "verifier": {"software": "0.1.0", "engine": "transformers 5.0.0", "dtype": "float32", "device": "cpu"},
    "judged_ms": T0 + 70_000,
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
}


# --- SPEC 6 ---


def identity() -> dict[str, Any]:
    section = Section("6")
    for name, public in (
        ("trainer", TRAINER.public),
        ("node", NODE.public),
        ("all_zero", bytes(32)),
        ("all_ones", b"\xff" * 32),
    ):
        section.good(
            "peer_id",
            f"peer_id_{name}",
            "the peer id of a public key, both ways",
            text=wire.peer_id(public),
            value={"node": public},
        )
    good = wire.peer_id(NODE.public)
    for name, comment, text in (
        ("empty", "no text", ""),
        ("alphabet", "0 is not in the base58 alphabet", good[:-1] + "0"),
        ("blank", "a blank at the end", good + " "),
        ("short", "31 key bytes", wire.base58(bytes.fromhex("00230801121f") + NODE.public[:31])),
        ("long", "33 key bytes", wire.base58(bytes.fromhex("002508011221") + NODE.public + b"\0")),
        ("leading_one", "one more zero byte in front", "1" + good),
        ("secp256k1", "key type 2", wire.base58(bytes.fromhex("002408021220") + NODE.public)),
        ("sha256_hash", "a hashed (RSA) peer id", wire.base58(b"\x12\x20" + NODE.public)),
        ("not_ascii", "a letter outside ASCII", good[:-1] + "é"),
    ):
        section.bad("peer_id", f"peer_id_{name}", comment, "MALFORMED", text=text)
    for kind, domain in wire.DOMAINS.items():
        section.good(
            "verify",
            f"signature_{kind.lower()}",
            f"{domain.decode()} over the payload",
            node=NODE.public,
            domain=domain.decode(),
            payload=b"payload",
            signature=NODE.sign(domain, b"payload"),
            value=True,
        )
    section.good(
        "verify",
        "signature_empty_payload",
        "the payload may be empty",
        node=NODE.public,
        domain="rlcommons/trace/1",
        payload=b"",
        signature=NODE.sign(b"rlcommons/trace/1", b""),
        value=True,
    )
    _bad_signatures(section)
    _envelopes(section)
    return section.content()


def _bad_signatures(section: Section) -> None:
    domain, payload = b"rlcommons/trace/1", b"payload"
    good = NODE.sign(domain, payload)
    high = (int.from_bytes(good[32:], "little") + GROUP_ORDER).to_bytes(32, "little")
    undomained = NODE._key.sign(payload)
    unlengthed = NODE._key.sign(domain + payload)
    neutral = b"\1" + bytes(63)
    off_curve = bytes([2]) + bytes(31)  # y = 2 is no point's
    for name, comment, node, payload_, signature in (
        ("flipped_bit", "one bit of the signature", NODE.public, payload, bytes([good[0] ^ 1]) + good[1:]),
        ("other_payload", "one byte more", NODE.public, payload + b"\0", good),
        ("other_signer", "another key", STRANGER.public, payload, good),
        ("short", "63 bytes", NODE.public, payload, good[:-1]),
        ("long", "65 bytes", NODE.public, payload, good + b"\0"),
        ("s_not_reduced", "S + L, the same scalar in another form", NODE.public, payload, good[:32] + high),
        ("no_domain", "signed without a domain", NODE.public, payload, undomained),
        ("no_length", "signed without the domain's length", NODE.public, payload, unlengthed),
        ("key_off_curve", "32 bytes that are no point", off_curve, payload, good),
        ("all_zero", "64 zero bytes", NODE.public, payload, bytes(64)),
        ("small_order_0", "a key of order 4 and the signature anyone can make for it", bytes(32), b"\0", bytes(64)),
        *(
            (f"small_order_{name}", "a key of small order: R is the neutral point, S is 0", key, payload, neutral)
            for name, key in SMALL_ORDER.items()
        ),
    ):
        section.bad(
            "verify",
            f"signature_{name}",
            comment,
            "BAD_SIGNATURE",
            node=node,
            domain=domain.decode(),
            payload=payload_,
            signature=signature,
        )
    for other in wire.DOMAINS.values():
        if other != domain:
            section.bad(
                "verify",
                f"signature_for_{other.decode().split('/')[1]}",
                "a trace's signature offered as another object's",
                "BAD_SIGNATURE",
                node=NODE.public,
                domain=other.decode(),
                payload=payload,
                signature=good,
            )


def _envelopes(section: Section) -> None:
    sealed = wire.seal(NODE, "Trace", TRACE)
    section.good(
        "unseal",
        "sealed_trace",
        "a signed trace, signer known",
        object="Trace",
        bytes=wire.encode("Signed", sealed),
        signer=NODE.public,
        value=TRACE,
    )
    garbage = b"\xc1"
    lied = swapped("Trace", TRACE)
    wrong_domain = wire.seal(NODE, "Trace", TRACE, wire.DOMAINS["Lease"])
    for name, comment, error, signed in (
        ("sealed_by_another", "a stranger signs it himself", "BAD_SIGNATURE", wire.seal(STRANGER, "Trace", TRACE)),
        (
            "sealed_signer_replaced",
            "the signer field alone is changed",
            "BAD_SIGNATURE",
            sealed | {"signer": STRANGER.public},
        ),
        ("sealed_in_another_domain", "signed as a lease", "BAD_SIGNATURE", wrong_domain),
        (
            "sealed_payload_changed",
            "the payload's last byte",
            "BAD_SIGNATURE",
            sealed | {"payload": sealed["payload"][:-1] + b"\0"},
        ),
        (
            "sealed_garbage_unsigned",
            "the signature is judged before the payload is read",
            "BAD_SIGNATURE",
            sealed | {"payload": garbage},
        ),
        ("sealed_garbage", "well signed, but no msgpack", "MALFORMED", _signed(NODE, "Trace", garbage)),
        ("sealed_not_canonical", "well signed, keys swapped", "NOT_CANONICAL", _signed(NODE, "Trace", lied)),
        (
            "sealed_other_object",
            "a receipt signed as a trace",
            "MALFORMED",
            _signed(NODE, "Trace", wire.encode("Receipt", RECEIPT)),
        ),
    ):
        section.bad(
            "unseal",
            name,
            comment,
            error,
            object="Trace",
            bytes=wire.encode("Signed", signed),
            signer=NODE.public,
        )
    for name, comment, key, raw in (
        ("sealed_empty_payload", "an envelope around nothing", "payload", wire.blob(b"")),
        ("sealed_short_signer", "31 bytes of key", "signer", wire.blob(NODE.public[:31])),
        ("sealed_short_signature", "63 bytes of signature", "signature", wire.blob(bytes(63))),
        ("sealed_text_payload", "the payload as text", "payload", wire.text("payload")),
    ):
        section.bad("decode", name, comment, "MALFORMED", object="Signed", bytes=with_raw("Signed", sealed, key, raw))


def _signed(key: wire.Key, kind: str, payload: bytes) -> dict[str, bytes]:
    return {"payload": payload, "signer": key.public, "signature": key.sign(wire.DOMAINS[kind], payload)}


# --- SPEC 7 ---


def codec() -> dict[str, Any]:
    section = Section("7")
    for number in (0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32, 2**63, 2**64 - 1):
        section.object("Slot", f"uint_{number}", "the shortest form of an integer", {"index": 0, "seed": number})
    blank = {"software": "", "engine": "", "dtype": "", "device": ""}
    for length in (0, 31, 32):
        section.object("Fingerprint", f"text_{length}", "text length forms", blank | {"software": "a" * length})
    section.object("Fingerprint", "text_utf8", "64 characters of 4 bytes each", blank | {"software": "\U0001d11e" * 64})
    section.object("FileLeaf", "text_128", "text of 128 characters", {"name": "n" * 128, "digest": bytes(32)})
    for length in (1, 255, 256):
        section.object("BlobReply", f"bytes_{length}", "byte string length forms", {"data": bytes(length)})
    for length in (0, 15, 16):
        versions = list(range(length))
        section.object("GetLeases", f"list_{length}", "list length forms", {"slots": 1, "versions": versions})
    section.object("Returned", "empty_map", "an object without fields", {})
    section.object("GetManifest", "nil", "nil where it is allowed", {"version": None})
    for name, number in (
        ("zero", 0.0),
        ("negative_zero", -0.0),
        ("smallest", 5e-324),
        ("largest", 1.7976931348623157e308),
    ):
        section.object("Heartbeat", f"real_{name}", "a float64", _heartbeat() | {"tokens_per_second": number})
    section.object("Heartbeat", "map_7", "a map in its short form", _heartbeat())
    section.object("Lease", "map_16_form", "17 fields: the long form of a map is then the shortest", LEASE)
    _bad_forms(section)
    _bad_types(section)
    _bad_structure(section)
    return section.content()


def _heartbeat() -> dict[str, Any]:
    return {
        "clock_ms": T0,
        "policy_version": 0,
        "tokens_per_second": 12.5,
        "slots_busy": 2,
        "slots_total": 16,
        "unsent_traces": 0,
        "verdict_cursor": 7,
    }


def _bad_forms(section: Section) -> None:
    """Right values in forms that are not the shortest."""
    slot = {"index": 0, "seed": 5}
    for name, raw in (
        ("uint8", b"\xcc\x05"),
        ("uint16", b"\xcd\x00\x05"),
        ("uint32", b"\xce\x00\x00\x00\x05"),
        ("uint64", wide_uint(5)),
        ("int8", b"\xd0\x05"),
        ("int64", b"\xd3" + (5).to_bytes(8, "big")),
    ):
        data = with_raw("Slot", slot, "seed", raw)
        section.bad("decode", f"wide_{name}", "5 in a longer form", "NOT_CANONICAL", object="Slot", bytes=data)
    float32 = with_raw("Heartbeat", _heartbeat(), "tokens_per_second", b"\xca\x41\x48\x00\x00")
    section.bad("decode", "float32", "12.5 as float32", "NOT_CANONICAL", object="Heartbeat", bytes=float32)
    leaf = {"name": "n", "digest": bytes(32)}
    for name, key, raw in (
        ("str8", "name", b"\xd9\x01n"),
        ("str16", "name", b"\xda\x00\x01n"),
        ("str32", "name", b"\xdb\x00\x00\x00\x01n"),
        ("bin16", "digest", b"\xc5\x00\x20" + bytes(32)),
        ("bin32", "digest", b"\xc6\x00\x00\x00\x20" + bytes(32)),
    ):
        data = with_raw("FileLeaf", leaf, key, raw)
        section.bad("decode", f"long_{name}", "a longer length form", "NOT_CANONICAL", object="FileLeaf", bytes=data)
    array16 = with_raw("GetLeases", {"slots": 1, "versions": [3]}, "versions", b"\xdc\x00\x01\x03")
    section.bad(
        "decode", "long_array16", "one item in the long form", "NOT_CANONICAL", object="GetLeases", bytes=array16
    )
    body = wire.encode("Slot", slot)[1:]
    section.bad(
        "decode",
        "long_map16",
        "two fields in the long form",
        "NOT_CANONICAL",
        object="Slot",
        bytes=b"\xde\x00\x02" + body,
    )
    section.bad(
        "decode",
        "long_map32",
        "two fields in the longest form",
        "NOT_CANONICAL",
        object="Slot",
        bytes=b"\xdf\x00\x00\x00\x02" + body,
    )
    wide_key = b"\x82\xd9\x05index\x00" + wire.text("seed") + b"\x05"
    section.bad("decode", "long_key", "a key in a longer form", "NOT_CANONICAL", object="Slot", bytes=wide_key)


def _bad_types(section: Section) -> None:
    slot = {"index": 0, "seed": 5}
    for name, comment, raw in (
        ("uint_negative", "-1", b"\xff"),
        ("uint_float", "5.0", wire.real(5.0)),
        ("uint_true", "true is no integer", wire.TRUE),
        ("uint_nil", "nil where it is not allowed", wire.NIL),
        ("uint_text", "'5'", wire.text("5")),
        ("uint_list", "a list", wire.array([])),
        ("uint_map", "a map", wire.mapping([])),
        ("ext", "an extension value", b"\xd4\x01\x05"),
        ("timestamp", "the timestamp extension", b"\xd6\xff\x00\x00\x00\x05"),
        ("reserved", "0xc1, which msgpack never uses", b"\xc1"),
    ):
        data = with_raw("Slot", slot, "seed", raw)
        section.bad("decode", f"type_{name}", comment, "MALFORMED", object="Slot", bytes=data)
    over = with_raw("Slot", slot, "index", wire.uint(1024))
    section.bad("decode", "range_uint", "one over the field's limit", "MALFORMED", object="Slot", bytes=over)
    for name, raw in (
        ("nan", b"\xcb\x7f\xf8" + bytes(6)),
        ("signalling_nan", b"\xcb\x7f\xf0" + bytes(5) + b"\x01"),
        ("float32_nan", b"\xca\x7f\xc0\x00\x00"),
        ("infinity", b"\xcb\x7f\xf0" + bytes(6)),
        ("minus_infinity", b"\xcb\xff\xf0" + bytes(6)),
        ("integer", b"\x0c"),
        ("text", wire.text("12.5")),
    ):
        data = with_raw("Heartbeat", _heartbeat(), "tokens_per_second", raw)
        section.bad("decode", f"real_{name}", "not a finite float64", "MALFORMED", object="Heartbeat", bytes=data)
    leaf = {"name": "n", "digest": bytes(32)}
    for name, comment, key, raw in (
        ("text_as_bytes", "a byte string", "name", wire.blob(b"n")),
        ("text_too_long", "129 characters", "name", wire.text("n" * 129)),
        ("text_not_utf8", "a lone continuation byte", "name", b"\xa1\x80"),
        ("text_overlong", "'/' in two bytes", "name", b"\xa2\xc0\xaf"),
        ("text_surrogate", "half of a UTF-16 pair", "name", b"\xa3\xed\xa0\x80"),
        ("text_above_unicode", "beyond U+10FFFF", "name", b"\xa4\xf4\x90\x80\x80"),
        ("bytes_as_text", "text", "digest", wire.text("d" * 32)),
        ("bytes_short", "31 bytes", "digest", wire.blob(bytes(31))),
        ("bytes_long", "33 bytes", "digest", wire.blob(bytes(33))),
        ("bytes_as_list", "a list of integers", "digest", wire.array([b"\0"] * 8)),
    ):
        code = "TOO_LARGE" if name == "bytes_as_list" else "MALFORMED"
        section.bad(
            "decode", f"type_{name}", comment, code, object="FileLeaf", bytes=with_raw("FileLeaf", leaf, key, raw)
        )
    check = VERDICT["checks"][0]
    for name, comment, key, raw in (
        ("choice", "a word that is not in the list", "outcome", wire.text("MAYBE")),
        ("choice_case", "words are case sensitive", "outcome", wire.text("passed")),
        ("choice_as_bytes", "a byte string", "outcome", wire.blob(b"PASSED")),
        ("choice_nil", "nil where a word is required", "outcome", wire.NIL),
    ):
        section.bad(
            "decode", f"type_{name}", comment, "MALFORMED", object="Check", bytes=with_raw("Check", check, key, raw)
        )
    for name, raw in (("flag_one", wire.uint(1)), ("flag_nil", wire.NIL)):
        section.bad(
            "decode",
            f"type_{name}",
            "not true or false",
            "MALFORMED",
            object="Verdict",
            bytes=with_raw("Verdict", VERDICT, "audited", raw),
        )
    for name, comment, error, key, raw in (
        ("tokens_odd", "7 bytes", "MALFORMED", "tokens", wire.blob(bytes(7))),
        ("tokens_list", "a list of integers", "MALFORMED", "tokens", wire.array([wire.uint(1)])),
        ("tokens_text", "text", "MALFORMED", "tokens", wire.text("abcd")),
        ("floats_odd", "5 bytes", "MALFORMED", "logprobs", wire.blob(bytes(5))),
        ("floats_nan", "a NaN among them", "MALFORMED", "logprobs", wire.blob(bytes.fromhex("000000bf0000c07f"))),
        ("floats_infinity", "minus infinity among them", "MALFORMED", "logprobs", wire.blob(bytes.fromhex("000080ff"))),
    ):
        section.bad("decode", f"type_{name}", comment, error, object="Trace", bytes=with_raw("Trace", TRACE, key, raw))


def _bad_structure(section: Section) -> None:
    slot = {"index": 0, "seed": 5}
    good = wire.encode("Slot", slot)
    index, seed = wire.pairs("Slot", slot)
    for name, comment, error, data in (
        ("empty", "no bytes", "MALFORMED", b""),
        ("cut_off", "the last byte is missing", "MALFORMED", good[:-1]),
        ("trailing", "a nil follows", "MALFORMED", good + wire.NIL),
        ("twice", "the object twice", "MALFORMED", good + good),
        ("not_a_map", "a list of the values", "TOO_LARGE", wire.array([b"\0", b"\5"])),
        ("nil_object", "nil", "MALFORMED", wire.NIL),
        ("swapped", "keys in the other order", "NOT_CANONICAL", wire.mapping([seed, index])),
        ("duplicate", "a key twice, all there", "NOT_CANONICAL", wire.mapping([index, seed, seed])),
        (
            "duplicate_other_value",
            "a key twice, the last counts for most parsers",
            "NOT_CANONICAL",
            wire.mapping([index, ("seed", b"\6"), seed]),
        ),
        ("duplicate_for_missing", "a key twice in place of another", "MALFORMED", wire.mapping([seed, seed])),
        ("missing", "a field left out", "MALFORMED", wire.mapping([index])),
        ("unknown", "a field no table lists", "MALFORMED", wire.mapping([index, seed, ("zz", b"\0")])),
        ("unknown_for_missing", "a misspelt key", "MALFORMED", wire.mapping([index, ("sead", b"\5")])),
        ("key_bytes", "a key as a byte string", "MALFORMED", b"\x82\xc4\x05index\x00" + wire.text("seed") + b"\5"),
        ("key_integer", "an integer as a key", "MALFORMED", b"\x82\x00\x00" + wire.text("seed") + b"\5"),
        ("key_nil", "nil as a key", "MALFORMED", b"\x82\xc0\x00" + wire.text("seed") + b"\5"),
        ("announced_map", "a map that announces 2^32 - 1 fields", "MALFORMED", b"\xdf\xff\xff\xff\xff"),
        ("announced_text", "text that announces 2^32 - 1 bytes", "MALFORMED", b"\x82\xdb\xff\xff\xff\xff"),
        ("deep_maps", "a thousand maps in one another", "MALFORMED", (b"\x81\xa1a") * 1000 + wire.NIL),
    ):
        section.bad("decode", f"structure_{name}", comment, error, object="Slot", bytes=data)
    leases = {"slots": 1, "versions": []}
    for name, comment, raw in (
        ("65_items", "one over the list's limit", wire.array([b"\0"] * 65)),
        ("announced_list", "a list that announces 2^32 - 1 items", b"\xdd\xff\xff\xff\xff"),
        ("nested_announced_lists", "lists in lists, each announcing 65,535", b"\xdc\xff\xff" * 500),
    ):
        data = with_raw("GetLeases", leases, "versions", raw)
        section.bad("decode", f"list_{name}", comment, "TOO_LARGE", object="GetLeases", bytes=data)
    nested = with_raw("GetLeases", leases, "versions", wire.array([wire.array([b"\0"])]))
    section.bad(
        "decode", "list_of_lists", "a list where an integer belongs", "MALFORMED", object="GetLeases", bytes=nested
    )
    not_list = with_raw("GetLeases", leases, "versions", wire.uint(0))
    section.bad(
        "decode", "list_as_uint", "an integer where a list belongs", "MALFORMED", object="GetLeases", bytes=not_list
    )


# --- SPEC 8 ---


def genesis() -> dict[str, Any]:
    section = Section("8.1")
    payload = section.object("Genesis", "genesis", "the example run", GENESIS)
    share = GENESIS["environments"][0]
    two = GENESIS | {"environments": [share, {"name": "guess@1", "parameters": "", "weight": 1_000_000}]}
    section.object("Genesis", "genesis_two_environments", "two environments, the second a million times as often", two)
    section.good("run_id", "run_id", "SHA-256 of the payload", bytes=payload, value=RUN)
    sealed = wire.seal(TRAINER, "Genesis", GENESIS)
    section.good(
        "open_genesis",
        "opened",
        "run and trainer as a node was told",
        bytes=wire.encode("Signed", sealed),
        run=RUN,
        trainer=TRAINER.public,
        value=GENESIS,
    )
    by_stranger = wire.seal(STRANGER, "Genesis", GENESIS)
    other = wire.seal(TRAINER, "Genesis", GENESIS | {"name": "other"})
    flipped = sealed | {"signature": bytes(64)}
    for name, comment, error, signed, trainer in (
        ("opened_other_run", "another genesis of the same trainer", "WRONG_RUN", other, TRAINER.public),
        ("opened_bad_signature", "the right payload, unsigned", "BAD_SIGNATURE", flipped, TRAINER.public),
        ("opened_other_trainer", "signed by somebody else than was told", "BAD_SIGNATURE", by_stranger, TRAINER.public),
        ("opened_names_another", "signed well, but it names another trainer", "MALFORMED", by_stranger, None),
    ):
        section.bad("open_genesis", name, comment, error, bytes=wire.encode("Signed", signed), run=RUN, trainer=trainer)
    _invalid_objects(
        section,
        "Genesis",
        GENESIS,
        (
            ("no_environment", "nothing to do", "MALFORMED", "environments", wire.array([])),
            (
                "environment_twice",
                "the same tasks listed twice",
                "MALFORMED",
                "environments",
                wire.array([wire.encode("EnvironmentShare", share)] * 2),
            ),
            (
                "weight_zero",
                "an environment that never comes",
                "MALFORMED",
                "environments",
                wire.array([wire.encode("EnvironmentShare", share | {"weight": 0})]),
            ),
            (
                "weight_over",
                "over a million",
                "MALFORMED",
                "environments",
                wire.array([wire.encode("EnvironmentShare", share | {"weight": 1_000_001})]),
            ),
            (
                "environment_unnamed",
                "an empty name",
                "MALFORMED",
                "environments",
                wire.array([wire.encode("EnvironmentShare", share | {"name": ""})]),
            ),
            (
                "65_environments",
                "one too many",
                "TOO_LARGE",
                "environments",
                wire.array([wire.encode("EnvironmentShare", share)] * 65),
            ),
            ("long_name", "257 characters", "MALFORMED", "name", wire.text("n" * 257)),
            ("short_trainer", "31 bytes", "MALFORMED", "trainer", wire.blob(bytes(31))),
            ("short_root", "31 bytes", "MALFORMED", "first_policy_root", wire.blob(bytes(31))),
            ("short_anchor", "31 bytes", "MALFORMED", "audit_anchor", wire.blob(bytes(31))),
        ),
    )
    return section.content()


def _invalid_objects(section: Section, kind: str, value: dict[str, Any], cases: tuple[Any, ...]) -> None:
    unknown_field(section, kind, value)
    for name, comment, error, key, raw in cases:
        section.bad("decode", name, comment, error, object=kind, bytes=with_raw(kind, value, key, raw))


def address() -> dict[str, Any]:
    section = Section("8.2")
    peer, run = wire.peer_id(TRAINER.public), RUN.hex()
    for name, multiaddr in (
        ("ip4", "/ip4/203.0.113.7/tcp/4001"),
        ("ip6", "/ip6/2001:db8::7/tcp/4001"),
        ("dns", "/dns4/trainer.example/tcp/4001"),
    ):
        section.good(
            "address",
            name,
            "transport, peer id, run",
            text=f"{multiaddr}/p2p/{peer}/run/{run}",
            value={"multiaddr": multiaddr, "trainer": TRAINER.public, "run": RUN},
        )
    start = "/ip4/203.0.113.7/tcp/4001"
    for name, comment, text in (
        ("empty", "no text", ""),
        ("no_run", "the run is missing", f"{start}/p2p/{peer}"),
        ("no_peer", "the peer id is missing", f"{start}/run/{run}"),
        ("no_transport", "where to dial is missing", f"/p2p/{peer}/run/{run}"),
        ("relative", "does not begin with a slash", f"ip4/203.0.113.7/tcp/4001/p2p/{peer}/run/{run}"),
        ("short_run", "62 hex digits", f"{start}/p2p/{peer}/run/{run[:-2]}"),
        ("run_with_blanks", "64 digits with blanks between", f"{start}/p2p/{peer}/run/{run[:32]} {run[32:]}"),
        ("run_not_hex", "a letter beyond f", f"{start}/p2p/{peer}/run/{run[:-1]}g"),
        (
            "hashed_peer",
            "a peer id that holds no key",
            f"{start}/p2p/{wire.base58(bytes([18, 32]) + bytes(32))}/run/{run}",
        ),
    ):
        section.bad("address", name, comment, "USAGE", text=text)
    return section.content()


def policy() -> dict[str, Any]:
    section = Section("8.3")
    for leaf, (name, kind) in zip(
        POLICY_LEAVES,
        (("embed", "TensorLeaf"), ("norm", "TensorLeaf"), ("config", "FileLeaf"), ("tokenizer", "FileLeaf")),
        strict=True,
    ):
        value = _leaf_value(name)
        section.good("decode", f"leaf_{name}", "a leaf of the example policy", object=kind, bytes=leaf, value=value)
    for count in (1, 2, 3, 5, 8):
        leaves = [bytes([i]) for i in range(count)]
        section.good("merkle_root", f"tree_{count}", "a root over one-byte leaves", leaves=leaves, value=merkle(leaves))
    section.good("policy_root", "policy", "two tensors, two files", files=POLICY_FILES, value=ROOT)
    sharded = {
        "config.json": CONFIG,
        "model-00001-of-00002.safetensors": safetensors({"norm.weight": NORM}),
        "model-00002-of-00002.safetensors": safetensors({"embed.weight": EMBEDDING}),
        "tokenizer.json": TOKENIZER,
    }
    section.good(
        "policy_root", "policy_sharded", "the same tensors in two files: the same root", files=sharded, value=ROOT
    )
    ignored = POLICY_FILES | {"README.md": b"hello\n", "notes.pdf": b"%PDF"}
    section.good("policy_root", "policy_ignored_files", "files that are no part of a policy", files=ignored, value=ROOT)
    changed = POLICY_FILES | {"config.json": CONFIG + b"\n"}
    other = merkle([*POLICY_LEAVES[:2], file_leaf("config.json", CONFIG + b"\n"), POLICY_LEAVES[3]])
    section.good(
        "policy_root",
        "policy_config_changed",
        "one byte more of configuration: another root",
        files=changed,
        value=other,
    )
    _bad_policies(section)
    _manifests(section)
    return section.content()


def _leaf_value(name: str) -> dict[str, Any]:
    if name in ("embed", "norm"):
        dtype, shape, raw = EMBEDDING if name == "embed" else NORM
        return {"name": f"{name}.weight", "dtype": dtype, "shape": shape, "digest": sha256(raw)}
    return {"name": f"{name}.json", "digest": sha256(POLICY_FILES[f"{name}.json"])}


def _bad_policies(section: Section) -> None:
    def entry(begin: Any, end: Any, shape: Any = None, dtype: Any = "BF16") -> dict[str, Any]:
        return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [begin, end]}

    def model(table: dict[str, Any], size: int = 8) -> bytes:
        return with_header(json.dumps(table, separators=(",", ":")).encode(), bytes(size))

    good = POLICY_FILES["model.safetensors"]
    twice = (
        b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"a":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}'
    )
    for name, comment, content in (
        ("tensors_overlap", "two tensors share bytes", model({"a": entry(0, 6), "b": entry(4, 8)})),
        ("tensors_gap", "bytes that belong to no tensor", model({"a": entry(0, 3), "b": entry(4, 8)})),
        ("tensors_tail", "bytes after the last tensor", model({"a": entry(0, 4)})),
        ("tensors_backwards", "a tensor that ends before it begins", model({"a": entry(4, 0), "b": entry(0, 8)})),
        ("tensors_cut_off", "the last tensor is not all there", good[:-1]),
        ("header_cut_off", "the file ends within its header", good[:20]),
        ("header_too_long", "a header length of 2^63", (1 << 63).to_bytes(8, "little") + good[8:]),
        ("header_missing", "fewer than 8 bytes", good[:4]),
        ("header_not_json", "a header of blanks", with_header(b"    ", b"")),
        ("header_a_list", "a list, not a table", with_header(b"[]", b"")),
        ("header_name_twice", "a tensor named twice", with_header(twice, bytes(8))),
        ("header_text_offset", "an offset as text", model({"a": entry("0", 8)})),
        ("header_real_offset", "an offset as 0.0", model({"a": entry(0.0, 8)})),
        ("header_negative_shape", "a dimension below 0", model({"a": entry(0, 8, [-4])})),
        ("header_no_shape", "a tensor without shape", model({"a": {"dtype": "BF16", "data_offsets": [0, 8]}})),
        ("header_type_number", "a type that is no text", model({"a": entry(0, 8, dtype=16)})),
        ("header_surrogate", "a name that has no UTF-8 form", model({"\ud800": entry(0, 8)})),
    ):
        section.bad("policy_root", name, comment, "POLICY", files=POLICY_FILES | {"model.safetensors": content})
    weights = {name: content for name, content in POLICY_FILES.items() if name != "model.safetensors"}
    pickled = weights | {"pytorch_model.bin": b"\x80\x04."}
    for name, comment, files in (
        ("folder_pickle", "pickled weights, which run code when loaded", pickled),
        ("folder_no_weights", "no safetensors", weights),
        ("folder_no_config", "no config.json", {k: v for k, v in POLICY_FILES.items() if k != "config.json"}),
        ("folder_no_tokenizer", "no tokenizer.json", {k: v for k, v in POLICY_FILES.items() if k != "tokenizer.json"}),
        (
            "folder_tensor_twice",
            "a tensor in two files",
            POLICY_FILES | {"extra.safetensors": safetensors({"norm.weight": NORM})},
        ),
    ):
        section.bad("policy_root", name, comment, "POLICY", files=files)


def _manifests(section: Section) -> None:
    section.object("Manifest", "manifest", "the example policy", MANIFEST)
    four_mib = 4 * 1024 * 1024
    blob = {"digest": sha256(b"blob"), "length": four_mib}
    large = [{"name": "model.safetensors", "blobs": [blob, blob, blob | {"length": 1}]}]
    section.object("Manifest", "manifest_three_blobs", "full blobs and a rest", MANIFEST | {"files": large})
    empty = [{"name": "merges.txt", "blobs": []}]
    section.object("Manifest", "manifest_empty_file", "a file without bytes", MANIFEST | {"files": empty})

    def files(*items: tuple[str, list[dict[str, Any]]]) -> bytes:
        return wire.array([wire.encode("PolicyFile", {"name": name, "blobs": blobs}) for name, blobs in items])

    one = [{"digest": sha256(b"x"), "length": 1}]
    cases = [
        ("files_unsorted", "names out of order", "MALFORMED", files(("b.json", one), ("a.json", one))),
        ("files_twice", "a name twice", "MALFORMED", files(("a.json", one), ("a.json", one))),
        ("blob_early_short", "a short blob that is not the last", "MALFORMED", files(("a.json", [*one, *one]))),
        ("blob_empty", "a blob of no bytes", "MALFORMED", files(("a.json", [one[0] | {"length": 0}]))),
        ("blob_large", "a blob over 4 MiB", "MALFORMED", files(("a.json", [one[0] | {"length": four_mib + 1}]))),
        ("257_files", "one file too many", "MALFORMED", files(*((f"f{i:03}.json", one) for i in range(257)))),
    ]
    for name, text in (
        ("name_parent", "../a.json"),
        ("name_absolute", "/a.json"),
        ("name_folder", "a/b.json"),
        ("name_backslash", "a\\b.json"),
        ("name_hidden", ".a.json"),
        ("name_dash", "-a.json"),
        ("name_nul", "a\0.json"),
        ("name_newline", "a.json\n"),
        ("name_not_ascii", "é.json"),
        ("name_empty", ""),
        ("name_pickle", "model.bin"),
        ("name_code", "modeling.py"),
        ("name_suffix_alone", ".json"),
    ):
        cases.append((name, f"the file name {text!r}", "MALFORMED", files((text, one))))
    unknown_field(section, "Manifest", MANIFEST)
    for name, comment, error, raw in cases:
        code = "TOO_LARGE" if name == "257_files" else error
        section.bad(
            "decode", name, comment, code, object="Manifest", bytes=with_raw("Manifest", MANIFEST, "files", raw)
        )


def lease() -> dict[str, Any]:
    section = Section("8.4")
    section.object("Lease", "lease", "two slots of a group of eight", LEASE)
    whole = LEASE | {"slots": [{"index": i, "seed": i} for i in range(64)], "group_size": 64}
    section.object("Lease", "lease_64_slots", "a whole group", whole)
    section.object("Lease", "lease_cold", "a temperature other than 1", LEASE | {"temperature": 0.7})

    def slots(*indices: int) -> bytes:
        return wire.array([wire.encode("Slot", {"index": i, "seed": i}) for i in indices])

    zero, minus = wire.uint(0), wire.real(-1.0)
    _invalid_objects(
        section,
        "Lease",
        LEASE,
        (
            ("no_slot", "nothing to draw", "MALFORMED", "slots", slots()),
            ("slots_unsorted", "indices must ascend", "MALFORMED", "slots", slots(3, 0)),
            ("slot_twice", "an index twice", "MALFORMED", "slots", slots(3, 3)),
            ("slot_outside_group", "index 8 of a group of 8", "MALFORMED", "slots", slots(0, 8)),
            ("65_slots", "one too many", "TOO_LARGE", "slots", slots(*range(65))),
            ("group_size_over", "1,025", "MALFORMED", "group_size", wire.uint(1025)),
            ("no_environment_name", "an empty name", "MALFORMED", "environment", wire.text("")),
            ("empty_prompt", "no token to start from", "MALFORMED", "prompt", wire.blob(b"")),
            ("temperature_zero", "greedy is not a temperature", "MALFORMED", "temperature", wire.real(0.0)),
            ("temperature_negative", "below 0", "MALFORMED", "temperature", minus),
            ("temperature_integer", "an integer", "MALFORMED", "temperature", wire.uint(1)),
            ("no_turn_tokens", "turns of no token", "MALFORMED", "max_turn_tokens", zero),
            ("no_tokens", "no token at all", "MALFORMED", "max_tokens", zero),
            ("tokens_over", "over 131,072", "MALFORMED", "max_tokens", wire.uint(131_073)),
            (
                "ends_before_it_begins",
                "deadline at the time of issue",
                "MALFORMED",
                "deadline_ms",
                wire.uint(LEASE["issued_ms"]),
            ),
            (
                "seed_over",
                "a seed of more than 64 bits has no form: a real",
                "MALFORMED",
                "slots",
                wire.array([wire.mapping([("index", zero), ("seed", wire.real(2.0**64))])]),
            ),
        ),
    )
    sealed = wire.seal(TRAINER, "Lease", LEASE)
    section.good(
        "unseal",
        "sealed",
        "signed by the trainer",
        object="Lease",
        bytes=wire.encode("Signed", sealed),
        signer=TRAINER.public,
        value=LEASE,
    )
    own = wire.encode("Signed", wire.seal(NODE, "Lease", LEASE))
    section.bad(
        "unseal",
        "sealed_by_its_node",
        "a node writes its own lease",
        "BAD_SIGNATURE",
        object="Lease",
        bytes=own,
        signer=TRAINER.public,
    )
    return section.content()


def seed() -> dict[str, Any]:
    section = Section("8.5")
    for slot in (0, 3):
        value = seed_input(slot)
        data = section.object("SeedInput", f"seed_input_{slot}", "what slot and seed are bound by", value)
        section.good(
            "slot_seed",
            f"seed_{slot}",
            "BLAKE2b-512 with person rlcommons-seed-1, first 8 bytes",
            bytes=data,
            value=slot_seed(slot),
        )
    unknown_field(section, "SeedInput", seed_input(0))
    return section.content()


def trace() -> dict[str, Any]:
    section = Section("8.6")
    section.object("Trace", "trace", "two turns with an observation between", TRACE)
    one_turn = TRACE | {"tokens": [2], "spans": [{"kind": 0, "length": 1}], "logprobs": [-0.5]}
    section.object("Trace", "trace_one_token", "the shortest", one_turn)
    section.object(
        "Trace",
        "trace_largest_id",
        "ids are 32 bits wide; the vocabulary is verification's",
        one_turn | {"tokens": [2**32 - 1]},
    )
    spans = wire.encode("Span", {"kind": 0, "length": 1})
    _invalid_objects(
        section,
        "Trace",
        TRACE,
        (
            (
                "span_kind",
                "a third kind of span",
                "MALFORMED",
                "spans",
                wire.array([wire.mapping([("kind", b"\2"), ("length", b"\1")])]),
            ),
            (
                "513_spans",
                "within the longest list of a trace, over this one's",
                "TOO_LARGE",
                "spans",
                wire.array([spans] * 513),
            ),
            ("4097_proofs", "one too many", "TOO_LARGE", "proofs", wire.array([wire.blob(b"")] * 4097)),
            ("proof_long", "259 bytes", "MALFORMED", "proofs", wire.array([wire.blob(bytes(259))])),
            ("proof_text", "text", "MALFORMED", "proofs", wire.array([wire.text("proof")])),
            ("slot_over", "1,024", "MALFORMED", "slot", wire.uint(1024)),
            ("reward_nan", "not a number", "MALFORMED", "reward", b"\xcb\x7f\xf8" + bytes(6)),
            ("reward_integer", "1 for 1.0", "MALFORMED", "reward", wire.uint(1)),
            ("lease_id_short", "15 bytes", "MALFORMED", "lease_id", wire.blob(bytes(15))),
            ("engine_nil", "nil", "MALFORMED", "engine", wire.NIL),
            (
                "engine_unknown_key",
                "inside a nested object",
                "MALFORMED",
                "engine",
                plus("EngineDescriptor", ENGINE, "zz", wire.NIL),
            ),
            (
                "engine_swapped",
                "inside a nested object",
                "NOT_CANONICAL",
                "engine",
                swapped("EngineDescriptor", ENGINE),
            ),
            (
                "engine_long_type",
                "17 characters",
                "MALFORMED",
                "engine",
                with_raw("EngineDescriptor", ENGINE, "dtype", wire.text("f" * 17)),
            ),
        ),
    )
    return section.content()


def receipt() -> dict[str, Any]:
    section = Section("8.7")
    section.object("Receipt", "receipt", "the trainer has the trace", RECEIPT)
    sealed = wire.encode("Signed", wire.seal(TRAINER, "Receipt", RECEIPT))
    section.good(
        "unseal",
        "sealed",
        "signed by the trainer",
        object="Receipt",
        bytes=sealed,
        signer=TRAINER.public,
        value=RECEIPT,
    )
    as_verdict = wire.encode("Signed", wire.seal(TRAINER, "Receipt", RECEIPT, wire.DOMAINS["Verdict"]))
    section.bad(
        "unseal",
        "sealed_as_verdict",
        "signed in the verdicts' domain",
        "BAD_SIGNATURE",
        object="Receipt",
        bytes=as_verdict,
        signer=TRAINER.public,
    )
    _invalid_objects(
        section,
        "Receipt",
        RECEIPT,
        (
            ("digest_short", "31 bytes", "MALFORMED", "trace_digest", wire.blob(bytes(31))),
            ("sequence_negative", "-1", "MALFORMED", "sequence", b"\xff"),
        ),
    )
    return section.content()


def verdict() -> dict[str, Any]:
    section = Section("8.8")
    section.object("Verdict", "accepted", "audited and accepted", VERDICT)
    check = VERDICT["checks"][0]
    failed = check | {"outcome": "FAILED", "reason": "MARGIN", "value": 3.5, "start": 2, "end": 3}
    refused = VERDICT | {"outcome": "REFUSED", "reason": "MARGIN", "reward": None, "checks": [failed]}
    section.object("Verdict", "refused", "one check failed, at one token", refused)
    ours = VERDICT | {"outcome": "NOT_JUDGED", "reason": "VERIFIER_FAULT", "audited": False, "checks": []}
    section.object("Verdict", "not_judged", "a fault of the verifier's", ours)
    many = [check | {"name": f"check {i}"} for i in range(64)]
    section.object("Verdict", "64_checks", "as many as there may be", VERDICT | {"checks": many})

    def whole(name: str, comment: str, value: dict[str, Any]) -> None:
        section.bad("decode", name, comment, "MALFORMED", object="Verdict", bytes=wire.encode("Verdict", value))

    whole("accepted_with_reason", "a reason to accept", VERDICT | {"reason": "MARGIN"})
    whole("refused_without_reason", "no reason to refuse", VERDICT | {"outcome": "REFUSED"})
    whole(
        "refused_for_our_fault",
        "the verifier's fault counted against the node",
        VERDICT | {"outcome": "REFUSED", "reason": "VERIFIER_FAULT"},
    )
    whole(
        "not_judged_for_theirs", "the node's fault not judged", VERDICT | {"outcome": "NOT_JUDGED", "reason": "MARGIN"}
    )
    whole(
        "check_failed_without_reason",
        "a check that fails for no reason",
        VERDICT | {"checks": [failed | {"reason": None}]},
    )
    whole(
        "check_passed_with_reason",
        "a check that passes and gives a reason",
        VERDICT | {"checks": [check | {"reason": "MARGIN"}]},
    )
    _invalid_objects(
        section,
        "Verdict",
        VERDICT,
        (
            ("reason_unknown", "a word that is not in the list", "MALFORMED", "reason", wire.text("DISLIKED")),
            ("outcome_unknown", "a word that is not in the list", "MALFORMED", "outcome", wire.text("MAYBE")),
            ("65_checks", "one too many", "TOO_LARGE", "checks", wire.array([wire.encode("Check", check)] * 65)),
            ("reward_infinite", "not finite", "MALFORMED", "reward", b"\xcb\x7f\xf0" + bytes(6)),
        ),
    )
    own = wire.encode("Signed", wire.seal(NODE, "Verdict", VERDICT))
    section.bad(
        "unseal",
        "sealed_by_its_node",
        "a node acquits itself",
        "BAD_SIGNATURE",
        object="Verdict",
        bytes=own,
        signer=TRAINER.public,
    )
    return section.content()


def trace_file() -> dict[str, Any]:
    section = Section("8.9")
    full = {
        "genesis": wire.seal(TRAINER, "Genesis", GENESIS),
        "lease": wire.seal(TRAINER, "Lease", LEASE),
        "trace": wire.seal(NODE, "Trace", TRACE),
        "receipt": wire.seal(TRAINER, "Receipt", RECEIPT),
        "verdict": wire.seal(TRAINER, "Verdict", VERDICT),
    }
    section.object("TraceFile", "full", "everything the trainer signed about a trace", full)
    section.object("TraceFile", "unjudged", "before receipt and verdict", full | {"receipt": None, "verdict": None})
    _invalid_objects(
        section,
        "TraceFile",
        full,
        (
            ("trace_nil", "a trace is required", "MALFORMED", "trace", wire.NIL),
            (
                "trace_unsealed",
                "the trace itself: its lists are longer than any in a trace file, which has none",
                "TOO_LARGE",
                "trace",
                wire.encode("Trace", TRACE),
            ),
            (
                "receipt_bytes",
                "the envelope as bytes",
                "MALFORMED",
                "receipt",
                wire.blob(wire.encode("Signed", full["receipt"])),
            ),
        ),
    )
    return section.content()


# --- SPEC 9 ---


def _messages() -> dict[str, dict[str, Any]]:
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
        "Submit": {"trace": wire.seal(NODE, "Trace", TRACE)},
        "Submitted": {"receipt": wire.seal(TRAINER, "Receipt", RECEIPT), "verdict": None},
        "Heartbeat": _heartbeat(),
        "HeartbeatReply": {
            "clock_ms": T0,
            "latest_version": 0,
            "verdicts": [wire.seal(TRAINER, "Verdict", VERDICT)],
            "verdict_cursor": 8,
        },
        "GetBlob": {"digest": sha256(CONFIG)},
        "BlobReply": {"data": CONFIG},
    }


def _body(kind: str, value: dict[str, Any]) -> bytes:
    return bytes([wire.NUMBERS[kind]]) + wire.encode(kind, value)


def messages() -> dict[str, Any]:
    section = Section("9.3")
    values = _messages()
    for kind, value in values.items():
        section.good(
            "message", kind.lower(), f"message {wire.NUMBERS[kind]}", object=kind, bytes=_body(kind, value), value=value
        )
    empty = {"leases": [], "retry_ms": 5000, "cause": "the policy is being replaced"}
    section.good(
        "message",
        "leasesreply_empty",
        "ask again in five seconds",
        object="LeasesReply",
        bytes=_body("LeasesReply", empty),
        value=empty,
    )
    verdict_alone = {"receipt": None, "verdict": wire.seal(TRAINER, "Verdict", VERDICT)}
    section.good(
        "message",
        "submitted_verdict_alone",
        "a trace that answers no lease of its signer",
        object="Submitted",
        bytes=_body("Submitted", verdict_alone),
        value=verdict_alone,
    )
    hello = values["Hello"]
    for name, comment, error, data in (
        ("no_number", "an empty body", "MALFORMED", b""),
        ("number_0", "zero is no message", "MALFORMED", b"\0" + wire.encode("Returned", {})),
        ("number_16", "not assigned", "MALFORMED", b"\x10" + wire.encode("Returned", {})),
        ("number_255", "not assigned", "MALFORMED", b"\xff" + wire.encode("Returned", {})),
        ("number_of_another", "a heartbeat as a hello", "MALFORMED", b"\1" + wire.encode("Heartbeat", _heartbeat())),
        ("number_alone", "no object follows", "MALFORMED", b"\1"),
        ("trailing", "one byte too many", "MALFORMED", _body("Returned", {}) + b"\0"),
        (
            "returned_with_field",
            "a field in an object without fields",
            "MALFORMED",
            b"\x09" + wire.mapping([("a", b"\0")]),
        ),
        (
            "hello_17_versions",
            "one too many",
            "TOO_LARGE",
            b"\1"
            + with_raw(
                "Hello",
                hello,
                "versions",
                wire.array([wire.encode("Version", {"major": 1, "minor": i}) for i in range(17)]),
            ),
        ),
        (
            "hello_version_over",
            "65,536",
            "MALFORMED",
            b"\1"
            + with_raw(
                "Hello", hello, "versions", wire.array([wire.mapping([("major", wire.uint(65_536)), ("minor", b"\0")])])
            ),
        ),
        (
            "leases_4097_slots",
            "room for more than 4,096",
            "MALFORMED",
            b"\6" + with_raw("GetLeases", values["GetLeases"], "slots", wire.uint(4097)),
        ),
        (
            "leases_65",
            "more leases than a reply may carry",
            "TOO_LARGE",
            b"\7" + with_raw("LeasesReply", empty, "leases", wire.array_head(65)),
        ),
        (
            "retry_over",
            "more than ten minutes",
            "MALFORMED",
            b"\7" + wire.encode("LeasesReply", empty | {"retry_ms": 600_001}),
        ),
        ("blob_empty", "a blob of no bytes", "MALFORMED", b"\x0f" + wire.encode("BlobReply", {"data": b""})),
        ("blob_digest_short", "31 bytes", "MALFORMED", b"\x0e" + wire.encode("GetBlob", {"digest": bytes(31)})),
        (
            "verdicts_257",
            "more verdicts than a reply may carry",
            "TOO_LARGE",
            b"\x0d" + with_raw("HeartbeatReply", values["HeartbeatReply"], "verdicts", wire.array_head(257)),
        ),
        (
            "rate_nan",
            "tokens a second",
            "MALFORMED",
            b"\x0c" + with_raw("Heartbeat", _heartbeat(), "tokens_per_second", b"\xcb\x7f\xf8" + bytes(6)),
        ),
    ):
        section.bad("message", name, comment, error, bytes=data)
    _negotiations(section)
    return section.content()


def _negotiations(section: Section) -> None:
    def spoken(*versions: str) -> list[dict[str, int]]:
        return [dict(zip(("major", "minor"), map(int, v.split(".")), strict=True)) for v in versions]

    for name, theirs, ours, chosen in (
        ("same", ("1.0",), "1.0", "1.0"),
        ("they_are_newer", ("1.4",), "1.2", "1.2"),
        ("they_are_older", ("1.1",), "1.2", "1.1"),
        ("several", ("3.1", "2.0", "1.5", "1.3"), "1.9", "1.5"),
    ):
        section.good(
            "negotiate",
            f"negotiate_{name}",
            "the highest both speak",
            theirs=spoken(*theirs),
            ours=spoken(ours)[0],
            value=spoken(chosen)[0],
        )
    for name, theirs, ours in (("newer_major", ("2.0",), "1.0"), ("older_major", ("1.9",), "2.0"), ("none", (), "1.0")):
        section.bad(
            "negotiate",
            f"negotiate_{name}",
            "no major number in common",
            "VERSION_MISMATCH",
            theirs=spoken(*theirs),
            ours=spoken(ours)[0],
        )


# --- SPEC 8.10: tasks ---

TOOLS = ("add", "sub", "mul", "max", "min", "mod", "gcd", "cat")
WORDS = ("sum", "difference", "product", "larger", "smaller", "remainder", "divisor", "joined")


def task_words(person: bytes, index: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=16, person=person).digest()
    return struct.unpack("<4I", digest)


def tool_result(tool: int, a: int, b: int) -> int:
    results = (a + b, a - b, a * b, max(a, b), min(a, b), a % b if b else 0, math.gcd(a, b), 100 * a + b)
    return results[tool]


def tools8_task(index: int) -> tuple[int, int, int]:
    first, second, third, _ = task_words(b"tools8@1", index)
    return third % 8, 10 + first % 22, 10 + second % 22


def guess_number(index: int) -> int:
    return 1 + task_words(b"guess@1", index)[0] % 20


def tasks() -> dict[str, Any]:
    section = Section("8.10")
    for index in (0, 1, 2, 41, 2**32, 2**64 - 1):
        tool, a, b = tools8_task(index)
        text = f"{WORDS[tool]} of {a} and {b}"
        section.good(
            "prompt",
            f"tools8_prompt_{index}",
            "the question",
            environment="tools8@1",
            index=index,
            value=[{"role": "user", "content": text}],
        )
        _tools8_rewards(section, index, str(tool_result(tool, a, b)))
    for reply, shown in (
        ("<|call|>add 12 30", "42"),
        ("<|call|>sub 12 30", "-18"),
        ("<|call|>mul 12 30", "360"),
        ("<|call|>max 12 30", "30"),
        ("<|call|>min 12 30", "12"),
        ("<|call|>mod 29 12", "5"),
        ("<|call|>gcd 12 30", "6"),
        ("<|call|>cat 12 30", "1230"),
        ("<|call|>cat 12 3", "1203"),
        ("<|call|>mod 12 0", "error"),
        ("<|call|>gcd 0 0", "0"),
        ("<|call|>add 05 7", "12"),
        ("<|call|>add 123 4", "error"),
        ("<|call|>add 12 30 ", "error"),
        ("<|call|>add  12 30", "error"),
        ("<|call|>add 12 30\n", "error"),
        ("<|call|>add -1 2", "error"),
        ("<|call|>ADD 12 30", "error"),
        ("<|call|>pow 12 30", "error"),
        ("<|call|>add \u0661 2", "error"),
        ("<|call|>", "error"),
        ("<|answer|>42", None),
        (" <|call|>add 12 30", None),
        ("", None),
    ):
        name = f"tools8_step_{len(section.valid)}"
        comment = "a call" if shown not in ("error", None) else "no call" if shown is None else "not a call"
        section.good("step", name, comment, environment="tools8@1", index=0, replies=[reply], value=shown)
    _guesses(section)
    _letters(section)
    return section.content()


def asked_letter(index: int) -> str:
    return "abcdfghlmnprstw"[task_words(b"letters@1", index)[0] % 15]


def _letters(section: Section) -> None:
    for index in (0, 1, 41, 2**64 - 1):
        asked = asked_letter(index)
        text = f"Write one sentence of six words. Every word must begin with the letter {asked.upper()}."
        task = {"environment": "letters@1", "index": index}
        section.good(
            "prompt", f"letters_prompt_{index}", "the question", **task, value=[{"role": "user", "content": text}]
        )
        section.good("step", f"letters_step_{index}", "one turn", **task, replies=["x"], value=None)
        one, two = asked + "a", asked.upper() + "b"
        for name, reply, right, words in (
            ("six", f"{one} {two} {one}c {one}d {one}e {one}f.", 6, 6),
            ("two", f"{one}, {two}!", 2, 5),
            ("repeated", f"{one} {one.upper()} {two}", 2, 5),
            ("single_letters", " ".join(asked * 6), 0, 6),
            ("apostrophe", f"{one}'{one}z 9{two}", 3, 5),
            ("twelve", " ".join(asked + chr(97 + i) * 2 for i in range(12)), 12, 12),
            ("thirteen", " ".join(asked + chr(97 + i) * 2 for i in range(13)), 0, 13),
            ("not_ascii", f"\u0130{one} {two}\u00e9{one}c", 3, 5),
            ("none", "", 0, 5),
        ):
            section.good(
                "reward",
                f"letters_{name}_{index}",
                "words that begin with it",
                **task,
                replies=[reply],
                value=right / words,
            )


def _tools8_rewards(section: Section, index: int, right: str) -> None:
    call = "<|call|>add 1 1"
    for name, replies, reward in (
        ("right", [call, "<|answer|>" + right], 1.0),
        ("padded", [call, "<|answer|>0" + right], 0.0),
        ("blank", [call, "<|answer|>" + right + " "], 0.0),
        ("bare", [call, right], 0.0),
        ("early", ["<|answer|>" + right], 0.0),
        ("cut_off", [call, ""], 0.0),
    ):
        comment = "the second reply decides"
        section.good(
            "reward",
            f"tools8_{name}_{index}",
            comment,
            environment="tools8@1",
            index=index,
            replies=replies,
            value=reward,
        )


def _guesses(section: Section) -> None:
    section.good(
        "prompt",
        "guess_prompt",
        "the same for every task",
        environment="guess@1",
        index=0,
        value=[{"role": "user", "content": "guess 1-20"}],
    )
    for index in (0, 1, 2, 41, 2**64 - 1):
        hidden = guess_number(index)
        outside = [str(each) for each in (0, 21, 999)]
        for reply in (*map(str, range(1, 21)), *outside, "007", "", "x", "1000", " 7", "7\n", "\u0667"):
            known = reply.isascii() and reply.isdigit() and len(reply) <= 3
            shown = None if not known or int(reply) == hidden else "higher" if int(reply) < hidden else "lower"
            name = f"guess_step_{index}_{len(section.valid)}"
            section.good("step", name, "one guess", environment="guess@1", index=index, replies=[reply], value=shown)
        five = [str(hidden % 20 + 1)] * 5
        section.good(
            "step",
            f"guess_five_{index}",
            "no sixth guess",
            environment="guess@1",
            index=index,
            replies=five,
            value=None,
        )
        for replies in (
            [str(hidden)],
            ["0", "999"],
            ["10"],
            ["10", "15"],
            ["10", "15", "5"],
            [str(max(1, hidden - 1)), str(min(20, hidden + 1))],
            ["10", "x"],
            [str(hidden), ""],
            ["999", "0", "10", "5", str(hidden)],
        ):
            name = f"guess_reward_{index}_{len(section.valid)}"
            value = _guess_reward(hidden, replies)
            section.good(
                "reward", name, "what the hints left", environment="guess@1", index=index, replies=replies, value=value
            )


def _guess_reward(hidden: int, replies: list[str]) -> float:
    if not all(reply.isascii() and reply.isdigit() and len(reply) <= 3 for reply in replies):
        return 0.0
    guesses = [int(reply) for reply in replies]
    if guesses[-1] == hidden:
        return 1.0
    left = [n for n in range(1, 21) if all(n > g if g < hidden else n < g for g in guesses if g != hidden)]
    return math.floor(math.log2(20 // len(left)) + 1e-9) / 10


# --- SPEC 9.1: frames ---


def frame(kind: int, number: int, body: bytes) -> bytes:
    payload = bytes([kind]) + number.to_bytes(4, "big") + body
    return len(payload).to_bytes(4, "big") + payload


def error_body(code: str, message: str) -> bytes:
    return wire.mapping([("code", wire.text(code)), ("message", wire.text(message))])


def frames() -> dict[str, Any]:
    section = Section("9.1")
    values = _messages()
    hello, welcome = _body("Hello", values["Hello"]), _body("Welcome", values["Welcome"])
    busy = error_body("BUSY", "more than 64 requests are unanswered")
    announce = _body("Announce", values["Announce"])
    for name, kind, number, body in (
        ("hello", 0, 1, hello),
        ("welcome", 1, 1, welcome),
        ("request", 0, 2, _body("GetManifest", {"version": 0})),
        ("error_reply", 2, 7, busy),
        ("notice", 3, 0, announce),
        ("largest_id", 0, 2**32 - 1, b"\x09\x80"),
        ("empty_body", 1, 1, b""),
    ):
        value = {"kind": kind, "id": number, "body": body}
        section.good("payload", name, "a whole frame", bytes=frame(kind, number, body), value=value)
    for name, comment, code, payload in (
        ("no_payload", "a frame of length 0", "MALFORMED", b""),
        ("no_head", "four bytes", "MALFORMED", bytes(4)),
        ("kind_4", "an unknown kind", "MALFORMED", b"\4" + (1).to_bytes(4, "big")),
        ("request_0", "a request with the notices' id", "MALFORMED", bytes(5)),
        ("reply_0", "a reply with the notices' id", "MALFORMED", b"\1" + bytes(4)),
        ("notice_1", "a notice with an id", "MALFORMED", b"\3" + (1).to_bytes(4, "big")),
    ):
        section.bad("payload", name, comment, code, bytes=len(payload).to_bytes(4, "big") + payload)
    for code, message in (("BUSY", ""), ("INTERNAL", "m" * 1024), ("NOT_FOUND", "\u00e9" * 1024)):
        value = {"code": code, "message": message}
        section.good(
            "error_body", f"error_{code.lower()}", "a known code", bytes=error_body(code, message), value=value
        )
    unknown = error_body("NO_SUCH_CODE", "from a later version")
    section.good("error_body", "error_unknown_code", "read as INTERNAL", bytes=unknown, value={"code": "INTERNAL"})
    pair = [("code", wire.text("BUSY")), ("message", wire.text("later"))]
    for name, comment, code, data in (
        ("error_empty", "no map", "MALFORMED", b""),
        ("error_swapped", "keys in the other order", "MALFORMED", wire.mapping(pair[::-1])),
        ("error_missing", "no message", "MALFORMED", wire.mapping(pair[:1])),
        ("error_unknown_key", "a third key", "MALFORMED", wire.mapping([*pair, ("zz", wire.NIL)])),
        ("error_code_number", "a code that is no text", "MALFORMED", wire.mapping([("code", b"\1"), pair[1]])),
        ("error_long_message", "1,025 characters", "MALFORMED", error_body("BUSY", "m" * 1025)),
        (
            "error_long_form",
            "text in a longer form",
            "NOT_CANONICAL",
            wire.mapping([pair[0], ("message", b"\xd9\x05later")]),
        ),
        ("error_trailing", "one byte too many", "MALFORMED", wire.mapping(pair) + b"\0"),
    ):
        section.bad("error_body", name, comment, code, bytes=data)
    return section.content()


SECTIONS = {
    "identity.json": identity,
    "codec.json": codec,
    "genesis.json": genesis,
    "address.json": address,
    "policy.json": policy,
    "lease.json": lease,
    "seed.json": seed,
    "trace.json": trace,
    "receipt.json": receipt,
    "verdict.json": verdict,
    "trace_file.json": trace_file,
    "messages.json": messages,
    "frames.json": frames,
    "tasks.json": tasks,
}


def _numeric() -> dict[str, Any]:
    """The files of generate_numeric.py, which needs rlcommons' numpy code beside it."""
    if importlib.util.find_spec("generate_numeric") is None:
        return {}
    import generate_numeric

    files: dict[str, Any] = generate_numeric.build()
    return files


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return json.dumps(content, indent=1, ensure_ascii=True, allow_nan=False) + "\n"


def build() -> dict[str, str]:
    """File name → text, for every vector file."""
    files = {name: make() for name, make in SECTIONS.items()}
    return {name: _text(content) for name, content in {**files, **_numeric()}.items()}


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__)
        return 2
    files = build()
    if arguments:
        stale = [name for name, text in files.items() if not _same(HERE / name, text)]
        print(f"out of date: {', '.join(stale)}" if stale else f"{len(files)} vector files are up to date")
        return 1 if stale else 0
    for name, text in files.items():
        (HERE / name).write_text(text)
    print(f"wrote {len(files)} vector files")
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
