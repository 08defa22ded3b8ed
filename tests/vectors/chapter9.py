"""SPEC 9: frames, messages, version negotiation."""

from __future__ import annotations

from typing import Any

import wire
from example import TIMING, TRAINER, VERDICT, heartbeat, messages_of_the_run
from section import Section, with_raw


def _body(kind: str, value: dict[str, Any]) -> bytes:
    return bytes([wire.NUMBERS[kind]]) + wire.encode(kind, value)


def messages() -> dict[str, Any]:
    section = Section("9.3")
    values = messages_of_the_run()
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
        ("number_23", "not assigned", "MALFORMED", b"\x17" + wire.encode("Returned", {})),
        ("number_255", "not assigned", "MALFORMED", b"\xff" + wire.encode("Returned", {})),
        ("number_of_another", "a heartbeat as a hello", "MALFORMED", b"\1" + wire.encode("Heartbeat", heartbeat())),
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
        ("audit_digest_short", "31 bytes", "MALFORMED", b"\x10" + wire.encode("AskAudit", {"digest": bytes(31)})),
        (
            "audit_granted_number",
            "a number where a flag belongs",
            "MALFORMED",
            b"\x11" + with_raw("AuditAsked", values["AuditAsked"], "granted", b"\1"),
        ),
        (
            "peers_65",
            "more peers than a reply may carry",
            "TOO_LARGE",
            b"\x13" + with_raw("PeersReply", values["PeersReply"], "peers", wire.array_head(65)),
        ),
        (
            "addresses_5",
            "one address too many",
            "TOO_LARGE",
            b"\x12" + with_raw("GetPeers", values["GetPeers"], "addresses", wire.array([wire.text("a")] * 5)),
        ),
        (
            "haves_8193",
            "more digests than one request may ask about",
            "TOO_LARGE",
            b"\x14" + with_raw("GetHaves", values["GetHaves"], "digests", wire.array_head(8_193)),
        ),
        ("haves_digest_short", "31 bytes", "MALFORMED", b"\x14" + wire.encode("GetHaves", {"digests": [bytes(31)]})),
        ("haves_bitmap_long", "1,025 bytes", "MALFORMED", b"\x15" + wire.encode("Haves", {"bitmap": bytes(1_025)})),
        (
            "have_257",
            "one too many",
            "TOO_LARGE",
            b"\x16" + with_raw("Have", values["Have"], "digests", wire.array_head(257)),
        ),
        (
            "verdicts_257",
            "more verdicts than a reply may carry",
            "TOO_LARGE",
            b"\x0d" + with_raw("HeartbeatReply", values["HeartbeatReply"], "verdicts", wire.array_head(257)),
        ),
        (
            "timing_long",
            "2^32 ms",
            "MALFORMED",
            b"\x0a"
            + with_raw(
                "Submit",
                values["Submit"],
                "timing",
                with_raw("Timing", TIMING, "tool_ms", b"\xcf" + (2**32).to_bytes(8, "big")),
            ),
        ),
        (
            "rate_nan",
            "tokens a second",
            "MALFORMED",
            b"\x0c" + with_raw("Heartbeat", heartbeat(), "tokens_per_second", b"\xcb\x7f\xf8" + bytes(6)),
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


def frame(kind: int, number: int, body: bytes) -> bytes:
    payload = bytes([kind]) + number.to_bytes(4, "big") + body
    return len(payload).to_bytes(4, "big") + payload


def error_body(code: str, message: str) -> bytes:
    return wire.mapping([("code", wire.text(code)), ("message", wire.text(message))])


def frames() -> dict[str, Any]:
    section = Section("9.1")
    values = messages_of_the_run()
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
        ("error_lists", "lists in lists that announce much", "MALFORMED", b"\xdc\xff\xff" * 900),
        ("error_trailing", "one byte too many", "MALFORMED", wire.mapping(pair) + b"\0"),
    ):
        section.bad("error_body", name, comment, code, bytes=data)
    return section.content()
