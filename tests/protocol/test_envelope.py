"""Signed objects: who, what kind, in which order things are judged (SPEC 6.3).

Single faults with their codes: the unseal entries of tests/vectors.
"""

from __future__ import annotations

import hashlib

import pytest

from protocol import codec
from protocol.envelope import Signed, seal, unseal
from protocol.errors import Code, DecodeError, SignatureError
from protocol.identity import Identity
from protocol.lease import Lease
from protocol.trace import Trace
from protocol.verdict import Receipt, Verdict

TRAINER = Identity(bytes(range(32)))
NODE = Identity(bytes(range(32, 64)))
RECEIPT = Receipt(bytes(32), bytes(32), bytes(16), 3, NODE.node, 1_000, 7)


def test_what_is_sealed_opens_as_the_same_value() -> None:
    assert unseal(Receipt, seal(TRAINER, RECEIPT), signer=TRAINER.node) == RECEIPT


@pytest.mark.parametrize("cls", [Lease, Trace, Verdict])
def test_a_receipt_opens_as_nothing_else(cls: type) -> None:
    with pytest.raises(SignatureError, match=f"{cls.__name__.lower()}/1 signature"):
        unseal(cls, seal(TRAINER, RECEIPT), signer=TRAINER.node)


def test_a_stranger_s_signature_names_both_keys() -> None:
    with pytest.raises(SignatureError) as caught:
        unseal(Receipt, seal(NODE, RECEIPT), signer=TRAINER.node)

    assert NODE.peer_id in str(caught.value) and TRAINER.peer_id in str(caught.value)
    assert caught.value.code is Code.BAD_SIGNATURE


def test_without_a_known_signer_whoever_signed_is_taken() -> None:
    signed = seal(NODE, RECEIPT)

    assert unseal(Receipt, signed) == RECEIPT
    assert signed.signer == NODE.node


def test_a_payload_over_its_limit_is_refused_after_its_signature() -> None:
    signed = seal(TRAINER, RECEIPT)
    with pytest.raises(DecodeError) as caught:
        unseal(Receipt, signed, most=len(signed.payload) - 1)
    assert caught.value.code is Code.TOO_LARGE

    forged = Signed(signed.payload + b"\0", signed.signer, signed.signature)
    with pytest.raises(SignatureError):
        unseal(Receipt, forged, most=1)


def test_the_digest_is_of_the_payload_alone() -> None:
    signed = seal(TRAINER, RECEIPT)
    again = Signed(signed.payload, NODE.node, bytes(64))

    assert signed.digest == again.digest == hashlib.sha256(codec.encode(RECEIPT)).digest()


def test_signing_is_deterministic() -> None:
    assert seal(TRAINER, RECEIPT) == seal(TRAINER, RECEIPT)
