"""SPEC 7: the encoding, one fault an entry."""

from __future__ import annotations

from typing import Any

import wire
from example import LEASE, TRACE, VERDICT, heartbeat
from section import Section, wide_uint, with_raw


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
        section.object("Heartbeat", f"real_{name}", "a float64", heartbeat() | {"tokens_per_second": number})
    section.object("Heartbeat", "map_7", "a map in its short form", heartbeat())
    section.object("Lease", "map_16_form", "17 fields: the long form of a map is then the shortest", LEASE)
    _bad_forms(section)
    _bad_types(section)
    _bad_structure(section)
    return section.content()


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
    float32 = with_raw("Heartbeat", heartbeat(), "tokens_per_second", b"\xca\x41\x48\x00\x00")
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
        data = with_raw("Heartbeat", heartbeat(), "tokens_per_second", raw)
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
