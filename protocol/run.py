"""The run: its genesis, its id, and the one-string address people pass around (SPEC 8.1, 8.2)."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, ClassVar

from protocol import codec, identity, limits
from protocol.envelope import Signed, unseal
from protocol.errors import Code, DecodeError, UsageError

_RUN_TEXT = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class EnvironmentShare:
    """An environment of the run and its share of the tasks (`weight` over the sum of weights)."""

    name: Annotated[str, codec.Text(limits.MAX_NAME_CHARACTERS)]
    parameters: Annotated[str, codec.Text(limits.MAX_TEXT_CHARACTERS)]
    weight: Annotated[int, codec.UInt(1_000_000)]


@dataclass(frozen=True, slots=True)
class Genesis:
    """SPEC 8.1. What never changes in a run. The run id is the SHA-256 of its canonical bytes."""

    DOMAIN: ClassVar[bytes] = identity.DOMAIN_GENESIS

    name: Annotated[str, codec.Text(limits.MAX_NAME_CHARACTERS)]
    trainer: Annotated[bytes, codec.Bytes(identity.NODE_ID_BYTES)]
    created_ms: Annotated[int, codec.UInt()]
    environments: Annotated[tuple[EnvironmentShare, ...], codec.Many(codec.Object(EnvironmentShare), 64)]
    first_policy_root: Annotated[bytes, codec.Bytes(32)]
    # SPEC 10.7: last value of the audit hash chain; every draw is checked against it afterwards.
    audit_anchor: Annotated[bytes, codec.Bytes(32)]


def run_id(genesis: Signed) -> bytes:
    """SPEC 8.1: the run id is the SHA-256 of the genesis' canonical bytes (without the signature)."""
    return hashlib.sha256(genesis.payload).digest()


def check_genesis(genesis: Genesis) -> None:
    """SPEC 8.1: a run has tasks, each listed once. Raises DecodeError(MALFORMED)."""
    kinds = [(share.name, share.parameters) for share in genesis.environments]
    if not kinds or len(set(kinds)) != len(kinds):
        raise DecodeError(Code.MALFORMED, "the genesis lists no environment, or one twice")
    if any(not share.name or not share.weight for share in genesis.environments):
        raise DecodeError(Code.MALFORMED, "the genesis lists an environment without a name or a weight")


def open_genesis(signed: Signed, *, run: bytes, trainer: bytes | None = None) -> Genesis:
    """Verify a genesis against the run id (and the trainer) a node was told.

    Raises SignatureError or DecodeError (WRONG_RUN, or MALFORMED as `check_genesis`).
    """
    if run_id(signed) != run:
        raise DecodeError(Code.WRONG_RUN, f"this genesis is of run {run_id(signed).hex()[:16]}…, not {run.hex()[:16]}…")
    genesis = unseal(Genesis, signed, signer=trainer)
    if genesis.trainer != signed.signer:
        raise DecodeError(Code.MALFORMED, "the genesis names another trainer than the one that signed it")
    check_genesis(genesis)
    return genesis


@dataclass(frozen=True, slots=True)
class Membership:
    """SPEC 8.13. The trainer's word that a key is a node of its run, for nodes to show each other while it is away."""

    DOMAIN: ClassVar[bytes] = identity.DOMAIN_MEMBERSHIP

    run: Annotated[bytes, codec.Bytes(32)]
    node: Annotated[bytes, codec.Bytes(identity.NODE_ID_BYTES)]
    expires_ms: Annotated[int, codec.UInt()]


def open_membership(signed: Signed, *, run: bytes, trainer: bytes, node: bytes, now_ms: int) -> Membership:
    """What says that `node` is of the run now (SPEC 8.13). Raises SignatureError or DecodeError."""
    membership = unseal(Membership, signed, signer=trainer)
    if membership.run != run:
        raise DecodeError(Code.WRONG_RUN, "the membership is of another run")
    if membership.node != node:
        raise DecodeError(Code.BAD_SIGNATURE, "the membership is another node's")
    if membership.expires_ms <= now_ms:
        raise DecodeError(Code.NOT_FOUND, "the membership has expired")
    return membership


@dataclass(frozen=True, slots=True)
class RunAddress:
    """SPEC 8.2: `MULTIADDR/p2p/PEER_ID/run/RUN_ID`: where the trainer is, who it is, which run."""

    multiaddr: str  # transport part, e.g. /ip4/203.0.113.7/tcp/4001
    trainer: bytes
    run: bytes

    @property
    def dial(self) -> str:
        """The multiaddr a host dials, peer id included."""
        return f"{self.multiaddr}/p2p/{identity.peer_id(self.trainer)}"

    def __str__(self) -> str:
        return f"{self.dial}/run/{self.run.hex()}"

    @classmethod
    def parse(cls, text: str) -> RunAddress:
        """Raises UsageError saying which part is missing or wrong."""
        hint = "copy the whole line that `rltrainer serve` prints (/ip4/…/p2p/…/run/…)"
        if "://" in text:
            raise UsageError(
                f"'{text[:80]}' is a web address, the page of a run perhaps; nodes join by the other line: {hint}"
            )
        head, mark, run_text = text.strip().rpartition("/run/")
        if not mark:
            raise UsageError(f"'{text[:80]}' has no /run/ part: {hint}")
        multiaddr, mark, peer = head.rpartition("/p2p/")
        if not mark or not multiaddr.startswith("/"):
            raise UsageError(f"'{text[:80]}' has no /p2p/ part: {hint}")
        if not _RUN_TEXT.fullmatch(run_text):
            raise UsageError(f"the run id '{run_text[:70]}' is not 64 hex digits: {hint}")
        try:
            trainer = identity.node_from_peer_id(peer)
        except DecodeError as error:
            raise UsageError(f"{error}: {hint}") from None
        return cls(multiaddr, trainer, bytes.fromhex(run_text))
