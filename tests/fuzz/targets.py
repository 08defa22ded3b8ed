"""What may happen to bytes of strangers: one function a kind of input, which returns for any bytes at all.

A target raises when the product does: anything but the documented errors, or a value that is not what its bytes
say. Driven by hypothesis in test_targets.py, and by coverage in guided.py. Time and memory are the drivers' to
bound. Not here: what each single fault is called (tests/vectors).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import pkgutil
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import numpy as np
import trio

import protocol
from protocol import codec, delta, messages, policy
from protocol.envelope import Signed, unseal
from protocol.environments.base import Message
from protocol.environments.tokenizer import PolicyTokenizer
from protocol.errors import DecodeError, EngineError, NetError, PolicyError, RemoteError, UsageError
from protocol.identity import Identity
from protocol.net import base, session, yamux
from protocol.net.framing import ChannelClosed, FramedStream
from protocol.run import RunAddress
from protocol.trace import Trace
from tests.fuzz.episode import EMBEDDED, Stage, edited, made_stage
from verify.files import read_evidence
from verify.structure import policy_shape
from verify.thresholds import limits_for
from verify.toploc import NO_MANTISSA, ProofError, check_form, compare_many, count_chunks, judge_proofs

Check = Callable[[Any], None]

PEER = Identity(b"\x21" * 32).node


def _wire_objects() -> tuple[tuple[type, Check | None], ...]:
    """Every wire object of protocol/, by name, with its `check_…` where its file has one."""
    found: list[tuple[type, Check | None]] = []
    for info in pkgutil.iter_modules(protocol.__path__):
        if info.ispkg or info.name == "codec":
            continue
        module = importlib.import_module(f"protocol.{info.name}")
        found += [(cls, _check_of(module, cls)) for cls in vars(module).values() if _is_wire_object(cls, module)]
    return tuple(sorted(found, key=lambda pair: pair[0].__name__))


def _is_wire_object(cls: object, module: ModuleType) -> bool:
    """A dataclass of the module with a codec kind at its fields; one without any kind never travels."""
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__):
        return False
    hints = get_type_hints(cls, include_extras=True)
    extras = [getattr(hints[field.name], "__metadata__", ()) for field in dataclasses.fields(cls)]
    return not extras or any(isinstance(extra, codec.Kind) for each in extras for extra in each)


def _check_of(module: ModuleType, cls: type) -> Check | None:
    check: Check | None = getattr(module, f"check_{cls.__name__.lower()}", None)
    return check


OBJECTS = _wire_objects()
SIGNED = tuple(cls for cls, _ in OBJECTS if hasattr(cls, "DOMAIN"))


# --- codec: objects ---


def fuzz_codec(data: bytes, folder: Path) -> None:
    """u8 which object ‖ its bytes."""
    cls, check = OBJECTS[data[0] % len(OBJECTS)] if data else OBJECTS[0]
    try:
        value = codec.decode(cls, data[1:])
    except DecodeError:
        return
    assert codec.encode(value) == data[1:], "two encodings of one value"
    if isinstance(value, Signed):
        _opened(value)
    if check is not None:
        try:
            check(value)
        except DecodeError:
            return


def _opened(signed: Signed) -> None:
    for cls in SIGNED:
        try:
            value = unseal(cls, signed)
        except RemoteError:
            continue
        assert codec.encode(value) == signed.payload


# --- frames: what a connection carries ---


def fuzz_frames(data: bytes, folder: Path) -> None:
    """u8 layer ‖ what comes in: 0 a message, 1 an error's body, 2 frames of a session, 3 packets of a connection."""
    layer = (_message, _error_body, _session, _connection)[data[0] % 4 if data else 0]
    layer(data[1:])


def _message(body: bytes) -> None:
    try:
        message = messages.open_body(body)
    except DecodeError:
        return
    assert messages.pack(message) == body


def _error_body(body: bytes) -> None:
    try:
        refused = session.decode_error(body)
    except DecodeError:
        return
    assert isinstance(str(refused), str)


class _Script:
    """A channel whose peer says what the script holds and then goes away."""

    def __init__(self, script: bytes) -> None:
        self._script = script

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    async def receive_exactly(self, count: int) -> bytes:
        await trio.lowlevel.checkpoint()
        if len(self._script) < count:
            raise ChannelClosed("the script is over")
        taken, self._script = self._script[:count], self._script[count:]
        return taken

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()

    def abort(self) -> None:
        self._script = b""


def _session(script: bytes) -> None:
    async def on_request(body: bytes) -> bytes:
        _message(body)
        return messages.pack(messages.Returned())

    async def on_notice(body: bytes) -> None:
        _message(body)

    async def converse() -> None:
        ours = session.Session(FramedStream(_Script(script), PEER))
        try:
            await ours.run(on_request, on_notice)
        except (NetError, RemoteError):
            return
        raise AssertionError("the session outlived its stream")

    trio.run(converse)


class _Packets:
    """A link whose peer sends packets, each of a length that stands before it, and then goes away."""

    def __init__(self, script: bytes) -> None:
        self._script = script

    async def receive_packets(self) -> list[bytes]:
        await trio.lowlevel.checkpoint()
        if not self._script:
            raise ChannelClosed("the script is over")
        end = 1 + self._script[0]
        packet, self._script = self._script[1:end], self._script[end:]
        return [packet]

    async def send_packets(self, packets: list[bytes]) -> None:
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


def _connection(script: bytes) -> None:
    async def serve() -> None:
        limits = base.HostLimits(streams_per_peer=4, unread_bytes_per_peer=2 << 20, unread_bytes=2 << 20)
        unread = yamux.Unread(limits.unread_bytes)
        ours = yamux.Connection(_Packets(script), peer=PEER, is_initiator=False, limits=limits, unread=unread)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ours.run)
            try:
                while True:
                    nursery.start_soon(_read_out, await ours.accept())
            except ChannelClosed:
                pass
        assert unread.total == 0 and ours.channels == 0, "a connection that ended holds something"

    trio.run(serve)


async def _read_out(channel: yamux.Channel) -> None:
    try:
        while True:
            await channel.send(await channel.receive_some(64))
    except ChannelClosed:
        return


# --- traces: the checks that need no model ---


def fuzz_trace(data: bytes, folder: Path) -> None:
    """u8 form ‖ bytes: 0 a Trace, 1 edits of an honest one, 2 a trace file."""
    form, rest = data[0] % 3 if data else 0, data[1:]
    if form == 2:
        _trace_file(rest, folder)
        return
    stage = _stage()
    if form == 1:
        trace = edited(stage.honest, rest)
    else:
        try:
            trace = codec.decode(Trace, rest)
        except DecodeError:
            return
    judge_cheaply(stage, trace)


@functools.cache
def _stage() -> Stage:
    return made_stage()


def judge_cheaply(stage: Stage, trace: Trace) -> None:
    """Once as it is, and once as an answer to the stage's lease, so that the checks behind are reached."""
    assert codec.decode(Trace, codec.encode(trace)) == trace
    stage.judge(trace)
    stage.judge(stage.addressed(trace))


def _trace_file(data: bytes, folder: Path) -> None:
    path = folder / "trace.msgpack"
    path.write_bytes(data)
    try:
        read_evidence(path)
    except UsageError:
        return


# --- proofs ---

_PROOF_HEAD = struct.Struct("<BHBB")  # tokens, hidden, seed of the states, how the rest is cut


def fuzz_proof(data: bytes, folder: Path) -> None:
    """Head ‖ proofs, cut to the lengths they must have (even) or by a length u8 before each (odd)."""
    if len(data) < _PROOF_HEAD.size:
        return
    tokens, hidden, seed, cut = _PROOF_HEAD.unpack_from(data)
    hidden = max(1, hidden)  # policy_shape's word
    proofs = _cut_by_length(data[5:]) if cut % 2 else _cut_to_form(data[5:], tokens, hidden)
    try:
        parsed = check_form(proofs, tokens, hidden)
    except ProofError:
        return
    assert len(parsed) == count_chunks(tokens)
    if tokens * hidden <= 1 << 14:
        _compared(tokens, hidden, seed, proofs)


def _cut_to_form(data: bytes, tokens: int, hidden: int) -> list[bytes]:
    proofs = []
    for start in range(0, tokens, 32):
        size = 2 + 2 * min(128, min(32, tokens - start) * hidden)
        proofs.append(data[:size])
        data = data[size:]
    return proofs


def _cut_by_length(data: bytes) -> list[bytes]:
    proofs = []
    while data:
        proofs.append(data[1 : 1 + data[0]])
        data = data[1 + data[0] :]
    return proofs


def states(tokens: int, hidden: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """bfloat16 bits [tokens, hidden]; one seed in eight has values that are not finite."""
    bits = np.random.default_rng(seed).integers(0, 2**16, (tokens, hidden), dtype=np.uint16)
    return bits if seed % 8 == 0 else bits & np.uint16(0xBFFF)


def _compared(tokens: int, hidden: int, seed: int, proofs: list[bytes]) -> None:
    try:
        (results,) = compare_many([(states(tokens, hidden, seed), proofs)])
    except EngineError:
        return
    assert sum(result.length for result in results) == tokens
    for result in results:
        counts = (result.exponent_mismatches, result.sign_mismatches, result.elsewhere)
        assert all(0 <= count <= result.compared <= 128 for count in counts[:2]) and 0 <= counts[2] <= 32
        assert 0 <= result.mantissa_mean <= NO_MANTISSA and 0 <= result.mantissa_median <= NO_MANTISSA
    assert math.isfinite(judge_proofs(results, limits_for("float32", "float32")).value)


# --- policies: manifests and folders ---


def fuzz_policy(data: bytes, folder: Path) -> None:
    """u8 form ‖ bytes: 0 a manifest, 1 a safetensors file, 2 a header without its length, 3 a config.json,
    4 a tokenizer_config.json."""
    form, rest = data[0] % 5 if data else 0, data[1:]
    if form == 0:
        _manifest(rest)
    elif form == 3:
        _config(rest, folder)
    elif form == 4:
        _tokenizer(rest, folder)
    else:
        _weights(rest if form == 1 else _with_length(rest), folder)


def _manifest(data: bytes) -> None:
    try:
        manifest = codec.decode(policy.Manifest, data)
        policy.check_manifest(manifest)
    except DecodeError:
        return
    assert manifest.size == sum(blob.length for file in manifest.files for blob in file.blobs)


def _with_length(data: bytes) -> bytes:
    """u8 bytes of tensors ‖ header."""
    body = data[0] if data else 0
    return len(data[1:]).to_bytes(8, "little") + data[1:] + bytes(body)


def _weights(data: bytes, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(data)
    (folder / "config.json").write_bytes(b"{}")
    (folder / "tokenizer.json").write_bytes(b"{}")
    try:
        places = policy.read_safetensors(path)
        root = policy.policy_root(folder)
    except PolicyError:
        return
    assert len(root) == 32
    assert all(0 <= place.begin <= place.end <= len(data) for place in places)


def _config(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    try:
        shape = policy_shape(folder)
    except PolicyError:
        return
    assert shape.vocabulary_size > 0 and shape.hidden_size > 0


def _tokenizer(data: bytes, folder: Path) -> None:
    for name in ("tokenizer.json", "config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    (folder / "tokenizer_config.json").write_bytes(data)
    try:
        tokenizer = PolicyTokenizer.load(folder)
        tokenizer.prompt_ids((Message("user", "sum of 2 and 3"),))
        tokenizer.observation_ids("5")
    except PolicyError:
        return


# --- deltas between policies ---

DELTA_MOST_BYTES = 1 << 16


def delta_base(values: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """bfloat16 bits [values] that deltas of the seeds build on: all signs and many exponents."""
    return np.random.default_rng(values).integers(0, 2**16, values, dtype=np.uint16)


def fuzz_delta(data: bytes, folder: Path) -> None:
    """u8 form ‖ bytes: even the sections of one tensor of form / 2 values, odd the delta of a whole policy."""
    form, rest = data[0] if data else 0, data[1:]
    try:
        if form % 2:
            _policy_delta(rest)
        else:
            values = delta.decode(delta_base(form // 2), rest, form // 2)
            assert values.shape == (form // 2,)
    except DecodeError:
        return


def _policy_delta(data: bytes) -> None:
    reader = delta.DeltaReader(iter((data[:7], data[7:])), most_bytes=DELTA_MOST_BYTES)
    assert reader.table.size <= DELTA_MOST_BYTES
    assert sum(section.raw.size for section in reader.sections(delta_tensor)) == reader.table.size


def delta_tensor(name: str) -> delta.BaseTensor | None:
    """Every tensor of the policy that deltas of the seeds build on has 64 values; one name in two is not in it."""
    if len(name) % 2:
        return None
    return delta.BaseTensor("BF16", (8, 8), delta_base(64).view(np.uint8))


# --- addresses: what people paste ---


def fuzz_address(data: bytes, folder: Path) -> None:
    text = data.decode("utf-8", "replace")
    for parse in (RunAddress.parse, base.Address.parse):
        try:
            address = parse(text)
        except UsageError as error:
            assert len(str(error)) < 1_000
            continue
        assert parse(str(address)) == address


TARGETS: dict[str, Callable[[bytes, Path], None]] = {
    "codec": fuzz_codec,
    "frames": fuzz_frames,
    "trace": fuzz_trace,
    "proof": fuzz_proof,
    "policy": fuzz_policy,
    "delta": fuzz_delta,
    "address": fuzz_address,
}
