"""SPEC 8.3.5: deltas, written a second time: value by value in plain Python, bits as text.

Not here: choosing what is shortest. Each entry says how it is written, so that every form occurs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import wire
import zstandard
from example import sha256
from section import Section

MAGIC = b"ULPD1\n"
SAME, ULP, WHOLE = 0, 1, 2
BYTES, BITMAP = 32, 33

PLUS_ZERO, MINUS_ZERO, ONE, INFINITY, NAN = 0x0000, 0x8000, 0x3F80, 0x7F80, 0x7FC1
BASE = [ONE, 0x3F81, 0xC000, PLUS_ZERO]


def varint(number: int) -> bytes:
    if number < 128:
        return bytes([number])
    return bytes([number % 128 + 128]) + varint(number // 128)


def stream(raw: bytes, *, compress: bool = False) -> bytes:
    stored = zstandard.ZstdCompressor(level=19).compress(raw) if compress else raw
    return varint(len(raw)) + varint(len(stored)) + stored


def values(bits: Sequence[int]) -> bytes:
    return b"".join(struct.pack("<H", each) for each in bits)


def order(bits: int) -> int:
    return bits if bits < 0x8000 else -(bits & 0x7FFF)


class Ulp:
    """The five streams of one section; `modes` are used up one a list of numbers or subset, then `default`."""

    def __init__(self, modes: Sequence[int] = (), default: int = 0) -> None:
        self.directory = self.small = self.large = self.patches = b""
        self.bits = ""
        self.modes = list(modes)
        self.default = default

    def mode(self) -> int:
        chosen = self.modes.pop(0) if self.modes else self.default
        self.directory += bytes([chosen])
        return chosen

    def numbers(self, items: Sequence[int], mode: int) -> None:
        if mode == BYTES:
            for item in items:
                self.small += bytes([min(item, 255)])
                self.large += struct.pack("<I", item) if item >= 255 else b""
            return
        for item in items:
            self.bits += "0" * (item >> mode) + "1"
        for item in items:
            self.bits += format(item % 2**mode, f"0{mode}b") if mode else ""

    def subset(self, members: Sequence[int], of: int) -> None:
        self.directory += varint(len(members))
        if len(members) in (0, of):
            return
        mode = self.mode()
        if mode == BITMAP:
            self.bits += "".join("1" if each in members else "0" for each in range(of))
            return
        self.numbers([b - a - 1 for a, b in zip([-1, *members], members, strict=False)], mode)

    def bucket(self, steps: dict[int, int], of: int) -> None:
        """steps: rank → d of the values that are stepped."""
        self.subset(list(steps), of)
        lengths = [abs(step) for step in steps.values()]
        further = [place for place, length in enumerate(lengths) if length > 1]
        self.subset(further, len(lengths))
        if further:
            self.numbers([lengths[place] - 2 for place in further], self.mode())
        self.bits += "".join("1" if step > 0 else "0" for step in steps.values())

    def write(self, old: Sequence[int], new: Sequence[int]) -> Ulp:
        buckets: dict[int, dict[int, int]] = {}
        sizes: dict[int, int] = {}
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            exponent = before >> 7 & 0xFF
            rank = sizes[exponent] = sizes.get(exponent, 0) + 1
            if before == after:
                continue
            if after == MINUS_ZERO or (before, after) == (MINUS_ZERO, PLUS_ZERO):
                self.patches += struct.pack("<IH", place, after)
            else:
                buckets.setdefault(exponent, {})[rank - 1] = order(after) - order(before)
        self.directory += varint(len(buckets))
        for exponent in sorted(buckets):
            self.directory += bytes([exponent])
            self.bucket(buckets[exponent], sizes[exponent])
        return self

    def streams(self) -> list[bytes]:
        padded = self.bits + "0" * (-len(self.bits) % 8)
        bits = bytes(int(padded[start : start + 8], 2) for start in range(0, len(padded), 8))
        return [self.directory, self.small, self.large, self.patches, bits]

    def section(self, new: Sequence[int]) -> bytes:
        return head(ULP, values(new)) + b"".join(map(stream, self.streams()))


def head(mode: int, so_far: bytes) -> bytes:
    return bytes([mode]) + sha256(so_far)[:16]


def stepped(old: Sequence[int], new: Sequence[int], *modes: int, default: int = 0) -> bytes:
    return Ulp(modes, default).write(old, new).section(new)


def with_streams(new: Sequence[int], streams: Sequence[bytes]) -> bytes:
    """A section from streams that are given, with the check of `new`."""
    return head(ULP, values(new)) + b"".join(map(stream, streams))


def tensor(name: str, dtype: str, shape: list[int], raw: bytes, **other: Any) -> dict[str, Any]:
    leaf = {"name": name, "dtype": dtype, "shape": shape, "digest": sha256(raw)}
    return {"leaf": leaf, "size": len(raw)} | other


def table(*tensors: dict[str, Any]) -> bytes:
    return wire.encode("DeltaTable", {"tensors": list(tensors)})


def _tensors(section: Section) -> None:
    """op delta_tensor: one BF16 tensor's sections."""
    wide = [0x3F80 + i % 128 for i in range(300)]
    pairs, moved = [ONE, 0x3F81, 0xC000, 0xC001], [0x3F81, 0x3F82, 0xC001, 0xC000]
    zeros, turned_zeros = [PLUS_ZERO, MINUS_ZERO], [MINUS_ZERO, PLUS_ZERO]
    odd = [NAN, 0xFFC1, INFINITY, 0xFF80, 0x7F7F, 0x0001, 0x8001, ONE]
    turned = [0xFFFF, 0x7FFF, 0x7F7F, 0x7F80, INFINITY, 0x8001, 0x0001, 0xBF80]
    further = [each + (1 if i % 3 else 3) for i, each in enumerate(wide)]
    far = [0x4F80 if i % 60 == 7 else each for i, each in enumerate(wide)]
    one = [ONE, 0x3F82, 0xC000, PLUS_ZERO]
    cases: tuple[tuple[str, str, list[int], list[int], bytes], ...] = (
        ("same", "nothing changed", BASE, BASE, head(SAME, values(BASE))),
        ("ulp_one_step", "the second of two values with one exponent, by one step up", BASE, one, stepped(BASE, one)),
        (
            "ulp_all",
            "every value of two buckets, so no set needs more than its count",
            pairs,
            moved,
            stepped(pairs, moved),
        ),
        ("ulp_zeros", "±0 exchanged: patches", zeros, turned_zeros, stepped(zeros, turned_zeros)),
        (
            "ulp_odd_bits",
            "NaN payloads, infinities, subnormals, changes of sign",
            odd,
            turned,
            stepped(odd, turned, default=12),
        ),
        ("ulp_rice", "gaps and lengths as Rice", wide, further, stepped(wide, further, 1, 2, 0)),
        ("ulp_bitmap", "both sets as bitmaps", wide, further, stepped(wide, further, BITMAP, 1, BITMAP, 1)),
        (
            "ulp_bytes",
            "gaps and lengths as bytes, the lengths beyond one byte",
            wide,
            far,
            stepped(wide, far, default=BYTES),
        ),
        (
            "whole",
            "compressed, whatever the base holds",
            wide,
            far,
            head(WHOLE, values(far)) + stream(values(far), compress=True),
        ),
        ("whole_plain", "not compressed", BASE, one, head(WHOLE, values(one)) + stream(values(one))),
        ("empty", "a tensor of no values has no section", [], [], b""),
    )
    for name, comment, old, new, data in cases:
        section.good("delta_tensor", name, comment, base=values(old), bytes=data, value=values(new))
    _bad_tensors(section, one, wide, far)


def _bad_tensors(section: Section, one: list[int], wide: list[int], far: list[int]) -> None:
    good = stepped(BASE, one)
    directory, small, large, patches, bits = Ulp().write(BASE, one).streams()
    frame = zstandard.ZstdCompressor(level=19).compress(values(far))
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 20))
    zeros = values([PLUS_ZERO] * 4)

    def streams(**changed: bytes) -> bytes:
        kept = {"directory": directory, "small": small, "large": large, "patches": patches, "bits": bits}
        return with_streams(one, list((kept | changed).values()))

    def whole(raw: int, stored: bytes) -> bytes:
        return head(WHOLE, zeros) + varint(raw) + varint(len(stored)) + stored

    cases = (
        ("cut_off", "the last byte is missing", BASE, good[:-1], "MALFORMED"),
        ("trailing", "one byte follows", BASE, good + b"\0", "MALFORMED"),
        ("unknown_mode", "mode 3", BASE, b"\3" + good[1:], "MALFORMED"),
        ("other_check", "a bit of the check", BASE, good[:1] + bytes([good[1] ^ 1]) + good[2:], "MALFORMED"),
        ("other_base", "a base with one other value", [*BASE[:3], ONE], good, "MALFORMED"),
        ("same_of_other_base", "SAME with the check of other bytes", BASE, head(SAME, values(one)), "MALFORMED"),
        ("long_varint", "a length not in its shortest form", BASE, good[:17] + b"\x84\0" + good[18:], "MALFORMED"),
        (
            "raw_too_long",
            "a stream of 1,025 bytes for a section of 8",
            BASE,
            good[:17] + varint(1025) + good[18:],
            "TOO_LARGE",
        ),
        ("raw_by_a_gigabyte", "WHOLE that announces 2^30 bytes", BASE, whole(1 << 30, bomb), "TOO_LARGE"),
        ("raw_by_one", "WHOLE that announces a byte less than the section", BASE, whole(7, zeros[:7]), "TOO_LARGE"),
        ("bomb", "a frame of 2^20 bytes announced as 600", wide, whole(600, bomb), "MALFORMED"),
        ("frame_cut", "a frame without its end", wide, whole(600, frame[:-3]), "MALFORMED"),
        ("frame_then_bytes", "a byte after the frame", wide, whole(600, frame + b"\0"), "MALFORMED"),
        ("stored_longer", "stored is longer than raw", BASE, whole(8, zeros + b"\0"), "MALFORMED"),
        ("no_such_bucket", "an exponent that no value has", BASE, streams(directory=b"\1\x33\1\0"), "MALFORMED"),
        (
            "exponent_twice",
            "the bucket is listed twice",
            BASE,
            streams(directory=b"\2" + directory[1:] * 2),
            "MALFORMED",
        ),
        ("no_member", "a bucket without a stepped value", BASE, streams(directory=b"\1\x7f\0"), "MALFORMED"),
        ("too_many_members", "three of two", BASE, streams(directory=b"\1\x7f\3\0"), "MALFORMED"),
        ("member_beyond", "rank 2 of a bucket of two", BASE, streams(bits=b"\x30"), "MALFORMED"),
        (
            "bitmap_of_two",
            "a bitmap with a member more than announced",
            BASE,
            streams(directory=b"\1\x7f\1\x21\0", bits=b"\xe0"),
            "MALFORMED",
        ),
        ("unknown_numbers", "numbers of mode 21", BASE, streams(directory=b"\1\x7f\1\x15\0"), "MALFORMED"),
        ("bits_short", "no bits", BASE, streams(bits=b""), "MALFORMED"),
        ("bits_more", "a byte of bits more", BASE, streams(bits=bits + b"\0"), "MALFORMED"),
        ("bits_unused_set", "an unused bit is 1", BASE, streams(bits=bytes([bits[0] | 1])), "MALFORMED"),
        ("small_more", "a small number that nobody asks for", BASE, streams(small=b"\0"), "MALFORMED"),
        ("large_ragged", "large numbers of three bytes", BASE, streams(large=b"\0\0\0"), "MALFORMED"),
        ("directory_more", "a byte of directory more", BASE, streams(directory=directory + b"\0"), "MALFORMED"),
        (
            "step_beyond",
            "a step to 8000",
            [0x7FFF] * 2,
            with_streams([0x7FFF] * 2, [b"\1\xff\2\0", b"", b"", b"", b"\xc0"]),
            "MALFORMED",
        ),
        (
            "patch_beyond",
            "a patch of value 4 of four",
            BASE,
            with_streams(one, [b"\0", b"", b"", struct.pack("<IH", 4, 0), b""]),
            "MALFORMED",
        ),
    )
    for name, comment, old, data, error in cases:
        section.bad("delta_tensor", f"bad_{name}", comment, error, base=values(old), bytes=data)


OLD_POLICY = {
    "a.bias": {"dtype": "F32", "shape": [2], "raw": bytes(8)},
    "b.weight": {"dtype": "BF16", "shape": [2, 2], "raw": values(BASE)},
    "c.weight": {"dtype": "BF16", "shape": [4], "raw": values(BASE)},
    "gone": {"dtype": "BF16", "shape": [1], "raw": values([ONE])},
}


def _policies(section: Section) -> None:
    """op delta_policy: all tensors of a policy."""
    one = values([ONE, 0x3F82, 0xC000, PLUS_ZERO])
    reshaped, fresh = values(BASE), values([INFINITY, NAN])
    tensors = [
        tensor("a.bias", "F32", [2], bytes(8)),
        tensor("b.weight", "BF16", [2, 2], one),
        tensor("c.weight", "BF16", [2, 2], reshaped),
        tensor("d.scale", "U8", [0], b""),
        tensor("e.weight", "BF16", [2], fresh),
    ]
    parts = [
        head(SAME, bytes(8)),
        stepped(BASE, [ONE, 0x3F82, 0xC000, PLUS_ZERO]),
        head(WHOLE, reshaped) + stream(reshaped),
        head(WHOLE, fresh) + stream(fresh),
    ]
    section.object("DeltaTable", "delta_table", "five tensors", {"tensors": tensors})

    def whole(*changed: dict[str, Any], sections: Sequence[bytes] = parts, magic: bytes = MAGIC) -> bytes:
        return magic + stream(table(*(changed or tensors))) + b"".join(sections)

    new = {each["leaf"]["name"]: raw for each, raw in zip(tensors, [bytes(8), one, reshaped, b"", fresh], strict=True)}
    section.good(
        "delta_policy",
        "delta",
        "kept, stepped, of another shape, empty, new; one is gone",
        base=OLD_POLICY,
        most=28,
        bytes=whole(),
        value=new,
    )
    squeezed = MAGIC + stream(table(*tensors), compress=True) + b"".join(parts)
    section.good(
        "delta_policy", "delta_small_table", "the table compressed", base=OLD_POLICY, most=28, bytes=squeezed, value=new
    )
    swapped = [tensors[1], tensors[0], *tensors[2:]]
    lying = tensor("b.weight", "BF16", [2, 2], one, size=6)
    other = tensor("b.weight", "BF16", [2, 2], reshaped)
    cases = (
        ("magic", "ULPD2", whole(magic=b"ULPD2\n"), 28, "MALFORMED"),
        ("table_unsorted", "the first two tensors in the other order", whole(*swapped), 28, "MALFORMED"),
        ("table_twice", "a tensor twice", whole(tensors[0], *tensors), 64, "MALFORMED"),
        (
            "table_size",
            "a BF16 tensor of four values and 6 bytes",
            whole(tensors[0], lying, *tensors[2:]),
            28,
            "MALFORMED",
        ),
        ("table_trailing", "a byte after the table's object", MAGIC + stream(table(*tensors) + b"\0"), 28, "MALFORMED"),
        ("table_huge", "a table of 2^24 + 1 bytes", MAGIC + varint(2**24 + 1) + varint(4) + bytes(4), 28, "TOO_LARGE"),
        ("more_than_most", "one byte more than the manifest allows", whole(), 27, "TOO_LARGE"),
        (
            "digest",
            "a section's check holds, the leaf's digest does not",
            whole(tensors[0], other, *tensors[2:]),
            28,
            "MALFORMED",
        ),
        (
            "same_without_base",
            "SAME for a tensor of another shape",
            whole(sections=[*parts[:2], head(SAME, reshaped), parts[3]]),
            28,
            "MALFORMED",
        ),
        (
            "steps_of_f32",
            "ULP for F32",
            whole(sections=[with_streams([0] * 4, [b"\0", b"", b"", b"", b""]), *parts[1:]]),
            28,
            "MALFORMED",
        ),
        ("section_missing", "the last section is missing", whole(sections=parts[:-1]), 28, "MALFORMED"),
        ("section_more", "a section follows", whole(sections=[*parts, parts[0]]), 28, "MALFORMED"),
    )
    for name, comment, data, most, error in cases:
        section.bad("delta_policy", f"bad_{name}", comment, error, base=OLD_POLICY, most=most, bytes=data)


def delta() -> dict[str, Any]:
    section = Section("8.3.5")
    _tensors(section)
    _policies(section)
    return section.content()
