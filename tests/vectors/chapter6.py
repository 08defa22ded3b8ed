"""SPEC 6: peer ids, signatures, signed objects."""

from __future__ import annotations

from typing import Any

import wire
from example import NODE, RECEIPT, STRANGER, TRACE, TRAINER
from section import Section, swapped, with_raw

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
