"""Ed25519 identities: the libp2p peer id is the node id; domain-separated signatures (SPEC 6).

A node is named on the wire by its 32-byte public key and to people by its peer id
(`12D3KooW…`), which is a function of the key. Not here: who may sign what (each object says so).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import Code, DecodeError, KeyFileError, SignatureError
from protocol.outputs import cause

NODE_ID_BYTES = 32
SIGNATURE_BYTES = 64
PRIVATE_BYTES = 32
_MOST_KEY_FILE_BYTES = 1024  # hex digits and what an editor leaves around them

# SPEC 6: the domain of a signature never travels; it is fixed by the object that is signed.
DOMAIN_GENESIS = b"rlcommons/genesis/1"
DOMAIN_MANIFEST = b"rlcommons/manifest/1"
DOMAIN_LEASE = b"rlcommons/lease/1"
DOMAIN_TRACE = b"rlcommons/trace/1"
DOMAIN_RECEIPT = b"rlcommons/receipt/1"
DOMAIN_VERDICT = b"rlcommons/verdict/1"
DOMAIN_CALIBRATION = b"rlcommons/calibration/1"
DOMAIN_EPOCH = b"rlcommons/epoch/1"
DOMAIN_MEMBERSHIP = b"rlcommons/membership/1"

# libp2p: multihash "identity", 36 bytes long, of the protobuf {type: Ed25519, data: 32 bytes}.
_PEER_ID_PREFIX = bytes.fromhex("002408011220")
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def _base58_encode(data: bytes) -> str:
    number = int.from_bytes(data, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


def _base58_decode(text: str) -> bytes:
    number = 0
    for character in text:
        number = number * 58 + _BASE58.index(character)  # ValueError on a character outside the alphabet
    body = number.to_bytes((number.bit_length() + 7) // 8, "big")
    return b"\0" * (len(text) - len(text.lstrip("1"))) + body


def peer_id(node: bytes) -> str:
    """The libp2p peer id (`12D3KooW…`) of a 32-byte Ed25519 public key."""
    if len(node) != NODE_ID_BYTES:
        raise ValueError(f"a node id has {NODE_ID_BYTES} bytes, not {len(node)}")
    return _base58_encode(_PEER_ID_PREFIX + node)


def node_from_peer_id(text: str) -> bytes:
    """The 32-byte public key inside an Ed25519 peer id.

    Raises DecodeError when the text is not an Ed25519 peer id.
    """
    try:
        raw = _base58_decode(text) if len(text) <= 64 else b""
    except ValueError:
        raw = b""
    if len(raw) != len(_PEER_ID_PREFIX) + NODE_ID_BYTES or not raw.startswith(_PEER_ID_PREFIX):
        raise DecodeError(Code.MALFORMED, f"'{text[:64]}' is not an Ed25519 peer id (they begin with 12D3KooW)")
    return raw[len(_PEER_ID_PREFIX) :]


# The five y coordinates of Ed25519's points of small order, for which anyone can make a signature that verifies.
_PRIME = 2**255 - 19
_ORDER_8 = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER = frozenset({0, 1, _PRIME - 1, _ORDER_8, _PRIME - _ORDER_8})


def _is_of_small_order(node: bytes) -> bool:
    return (int.from_bytes(node, "little") % 2**255) % _PRIME in _SMALL_ORDER


def _message(domain: bytes, payload: bytes) -> bytes:
    return bytes([len(domain)]) + domain + payload


class Identity:
    """A private key and the node id it stands for."""

    def __init__(self, private_bytes: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_bytes)
        self.private_bytes = private_bytes
        self.node: bytes = self._key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Identity:
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def peer_id(self) -> str:
        return peer_id(self.node)

    def sign(self, domain: bytes, payload: bytes) -> bytes:
        """SPEC 6: sig = Ed25519(sk, u8 len(domain) ‖ domain ‖ payload)."""
        return self._key.sign(_message(domain, payload))

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def verify(node: bytes, domain: bytes, payload: bytes, signature: bytes) -> None:
    """Raise SignatureError unless `signature` is `node`'s over (domain, payload)."""
    try:
        # SPEC 6.3: a key of small order MUST be refused.
        if _is_of_small_order(node):
            raise InvalidSignature
        Ed25519PublicKey.from_public_bytes(node).verify(signature, _message(domain, payload))
    except (InvalidSignature, ValueError):
        name = domain.decode("ascii")
        who = peer_id(node) if len(node) == NODE_ID_BYTES else "a malformed key"
        raise SignatureError(f"the {name} signature of {who} does not verify") from None


def save_identity(identity: Identity, path: Path) -> None:
    """Write a key file (hex of the 32 private bytes, mode 0600), whole or not at all. Never overwrites.

    Raises KeyFileError when the file exists or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KeyFileError(
            f"cannot write the key file {path}: {cause(error)} ({error.filename}): choose another place"
        ) from None
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyFileError(f"{path} exists already; move it away first, it may be somebody's identity") from None
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with os.fdopen(handle, "w") as file:
            file.write(identity.private_bytes.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)  # an empty one would look like somebody's identity
        if isinstance(error, OSError):
            raise _unwritable(path, error) from None
        raise


def _unwritable(path: Path, error: OSError) -> KeyFileError:
    return KeyFileError(f"cannot write the key file {path}: {cause(error)}: choose another place, or make room")


def load_identity(path: Path) -> Identity:
    """Read a key file written by `save_identity`.

    Raises KeyFileError when it is missing, unreadable, not a key, owned by someone else or readable by others; the
    message says which and what to do.
    """
    try:
        info = path.stat()
        is_ours = info.st_uid == os.geteuid()
        private = _private_bytes(path) if is_ours or os.access(path, os.R_OK) else b""
    except FileNotFoundError:
        raise KeyFileError(f"no key file at {path}: restore a backup, or start afresh with a new key") from None
    except OSError as error:
        raise KeyFileError(
            f"cannot read the key file {path}: {cause(error)}: look who may read it, or take a backup of it"
        ) from None
    if private is None:
        raise KeyFileError(f"{path} is not a key file: it should hold 64 hex digits")
    if not is_ours:
        raise KeyFileError(
            f"the key file {path} belongs to user id {info.st_uid}, not to you ({os.geteuid()}): "
            "run as its owner, or use a key of your own"
        )
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise KeyFileError(f"the key file {path} can be read by other users: run chmod 600 {path}")
    return Identity(private)


def _private_bytes(path: Path) -> bytes | None:
    """The private key in a file; None: that is no key file. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(_MOST_KEY_FILE_BYTES)
    try:
        private = bytes.fromhex(data.decode("ascii").strip())
    except ValueError:
        return None
    return private if len(private) == PRIVATE_BYTES else None
