"""What each target starts from: the vectors of the specification, in the form the target reads.

Made at every start and kept nowhere, so a new vector or object is a seed at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from protocol import codec, delta
from protocol.policy import TensorLeaf
from tests.fuzz.episode import EDIT, EMBEDDED, made_stage
from tests.fuzz.targets import OBJECTS, delta_base, delta_tensor

VECTORS = Path(__file__).parent.parent / "vectors"
_LONGEST = 16 * 1024  # mutating more costs time and finds little

Entry = dict[str, Any]


@functools.cache
def _entries() -> tuple[Entry, ...]:
    files = [json.loads(path.read_text()) for path in sorted(VECTORS.glob("*.json"))]
    return tuple(
        entry for file in files for side in ("valid", "invalid") for entry in file.get(side, ()) if "op" in entry
    )


def _of(op: str, kind: str | None = None) -> Iterator[Entry]:
    return (each for each in _entries() if each["op"] == op and (kind is None or each["object"] == kind))


def _raw(entry: Entry) -> bytes:
    return bytes.fromhex(entry["bytes"])


def _codec() -> Iterator[bytes]:
    places = {cls.__name__: place for place, (cls, _) in enumerate(OBJECTS)}
    for entry in _of("decode"):
        yield bytes([places[entry["object"]]]) + _raw(entry)


def _frames() -> Iterator[bytes]:
    for entry in _of("message"):
        yield b"\0" + _raw(entry)
    for entry in _of("error_body"):
        yield b"\1" + _raw(entry)
    for entry in _of("payload"):
        yield b"\2" + _raw(entry) * 2
    yield b"\3" + b"".join(map(_packet, (_yamux(1, 1, 1, 0), _yamux(0, 0, 1, 5) + b"hello", _yamux(1, 4, 1, 0))))
    yield b"\3" + b"".join(_packet(_yamux(0, 1, number, 3) + b"abc") for number in range(1, 13, 2))
    yield b"\3" + b"".join(map(_packet, (_yamux(2, 1, 0, 7), _yamux(2, 2, 0, 7), _yamux(3, 0, 0, 0))))


def _yamux(kind: int, flags: int, stream: int, length: int) -> bytes:
    return struct.pack(">BBHII", 0, kind, flags, stream, length)


def _packet(data: bytes) -> bytes:
    return bytes([len(data)]) + data


def _trace() -> Iterator[bytes]:
    yield b"\0" + codec.encode(made_stage().honest)
    for entry in _of("decode", "Trace"):
        yield b"\0" + _raw(entry)
    for entry in _of("decode", "TraceFile"):
        yield b"\2" + _raw(entry)
    yield b"\1"
    for what in range(9):
        yield b"\1" + EDIT.pack(what, 3, 8 + 1, 65) + EDIT.pack(8, 0, 0, 0)


def _proof() -> Iterator[bytes]:
    for entry in (*_of("form"), *_of("prove"), *_of("compare")):
        proofs = entry.get("proofs", entry.get("value", []))
        if entry["tokens"] > 255 or not isinstance(proofs, list):
            continue
        yield struct.pack("<BHBB", entry["tokens"], entry["hidden"], 1, 0) + b"".join(map(bytes.fromhex, proofs))


def _policy() -> Iterator[bytes]:
    for entry in _of("decode", "Manifest"):
        yield b"\0" + _raw(entry)
    for entry in _of("policy_root"):
        for name, content in entry["files"].items():
            data = bytes.fromhex(content)
            if name.endswith(".safetensors"):
                yield b"\1" + data
                yield b"\2" + bytes([len(data) % 256]) + data[8:]
            elif name == "config.json":
                yield b"\3" + data
    yield b'\2\x08{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"format":"pt"}}'
    yield b'\3{"vocab_size":259,"hidden_size":64,"text_config":{"vocab_size":1,"hidden_size":2}}'
    for name in ("tokenizer_config.json", "generation_config.json"):
        yield b"\4" + (EMBEDDED / name).read_bytes()
    yield b'\4{"chat_template":[{"name":"default","template":"{{ messages[0].content }}"}],"eos_token":"<|end|>"}'
    yield b'\4{"chat_template":"{% for m in messages %}{{ m.role }}{% endfor %}","bos_token":{"content":"a"}}'


def _delta() -> Iterator[bytes]:
    for values in (1, 7, 64, 127):
        old = delta_base(values)
        for new in (old, old + np.uint16(1), old[::-1].copy(), np.where(np.arange(values) % 9, old, old ^ 3), old * 0):
            yield bytes([2 * values]) + delta.encode(old, new.astype(np.uint16))
    for names in (("ab", "abc"), ("ab",), ("abc",)):
        new = delta_base(64) ^ np.uint16(1)
        raw = new.view(np.uint8)
        leaf = TensorLeaf("", "BF16", (8, 8), hashlib.sha256(raw.tobytes()).digest())
        table = delta.DeltaTable(tuple(delta.DeltaTensor(replace(leaf, name=name), raw.size) for name in names))
        yield b"\1" + b"".join(delta.encode_policy(table, delta_tensor, lambda name, raw=raw: raw))


def _address() -> Iterator[bytes]:
    for entry in _of("address"):
        yield entry["text"].encode()
    yield b"/dns4/node.example.org/tcp/65535/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsgZ1Cn2dVFBNgCGvkxTS3oM"


_SEEDS: dict[str, Callable[[], Iterator[bytes]]] = {
    "codec": _codec,
    "frames": _frames,
    "trace": _trace,
    "proof": _proof,
    "policy": _policy,
    "delta": _delta,
    "address": _address,
}


@functools.cache
def seeds(target: str) -> tuple[bytes, ...]:
    """Inputs of a target, each once, in one order."""
    return tuple(sorted({seed for seed in _SEEDS[target]() if len(seed) <= _LONGEST}))
