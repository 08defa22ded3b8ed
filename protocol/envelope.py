"""Signed objects: canonical payload bytes, who signed, and the signature (SPEC 6.3).

The payload travels as bytes and is verified before it is decoded. Which domain applies is fixed by
the class that is expected, so a signature for one kind of object never passes for another.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from protocol import codec, identity, limits
from protocol.errors import SignatureError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Signed:
    """SPEC 6.3. `payload` is the canonical encoding of the object."""

    payload: Annotated[bytes, codec.Bytes(1, limits.MAX_MANIFEST_BYTES)]
    signer: Annotated[bytes, codec.Bytes(identity.NODE_ID_BYTES)]
    signature: Annotated[bytes, codec.Bytes(identity.SIGNATURE_BYTES)]

    @property
    def digest(self) -> bytes:
        """SHA-256 of the payload: what receipts, verdicts and the ledger call this object."""
        return hashlib.sha256(self.payload).digest()


def seal(signer: identity.Identity, value: Any) -> Signed:
    """Encode and sign a wire object under its class' DOMAIN."""
    payload = codec.encode(value)
    return Signed(payload, signer.node, signer.sign(type(value).DOMAIN, payload))


def unseal(cls: type[T], signed: Signed, *, signer: bytes | None = None, most: int | None = None) -> T:
    """Verify, then decode. `signer` is who must have signed, when that is known.

    Raises SignatureError (wrong signer or bad signature) or DecodeError.
    """
    name = cls.__name__.lower()
    if signer is not None and signed.signer != signer:
        raise SignatureError(
            f"the {name} is signed by {identity.peer_id(signed.signer)}, not by {identity.peer_id(signer)}"
        )
    domain: bytes = cls.DOMAIN  # type: ignore[attr-defined]
    identity.verify(signed.signer, domain, signed.payload, signed.signature)
    return codec.decode(cls, signed.payload, most=most)
