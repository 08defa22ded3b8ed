"""Every number both sides must agree on. SPEC section 5 holds the same table; a test compares them.

Not here: anything one side may choose for itself (that is configuration).
"""

from __future__ import annotations

from typing import Final

# Versions of the wire protocol this code speaks, as (major, minor).
PROTOCOL_VERSION: Final = (1, 0)

# --- framing and session ---
MAX_FRAME_BYTES: Final = 4 * 1024 * 1024 + 64 * 1024  # one blob and its header
MAX_IN_FLIGHT_REQUESTS: Final = 64  # unanswered requests of one session
MAX_NOTICE_BYTES: Final = 256 * 1024  # body of a notice: many may wait to be handled
HEARTBEAT_SECONDS: Final = 10
SESSION_SILENCE_SECONDS: Final = 45  # no frame for so long: the session is dead
REQUEST_SECONDS: Final = 30  # deadline of one request
MAX_CLOCK_SKEW_SECONDS: Final = 300

# --- policy ---
MAX_BLOB_BYTES: Final = 4 * 1024 * 1024
MAX_POLICY_FILES: Final = 256
MAX_POLICY_BLOBS: Final = 262_144  # of one file; all together MAX_MANIFEST_BYTES ends at about 300 GiB
MAX_POLICY_DELTAS: Final = 16  # of one manifest
MAX_MANIFEST_BYTES: Final = 4 * 1024 * 1024
MAX_POLICY_TENSORS: Final = 131_072  # of a delta's table
MAX_DELTA_TABLE_BYTES: Final = 16 * 1024 * 1024
MAX_SECTION_BYTES: Final = 2 * 1024 * 1024  # of a tensor, coded at once
MAX_NAME_CHARACTERS: Final = 256

# --- peers ---
MAX_PEERS_PER_REPLY: Final = 64
MAX_PEER_ADDRESSES: Final = 4  # of one node
MAX_PEERS_ASKED: Final = 16  # by key, in one request
MAX_VERSIONS: Final = 64  # of policies that one node says it holds
MAX_HAVES: Final = 8_192  # blobs asked about at once: 32 GiB
MAX_HAVE_DIGESTS: Final = 256  # of one notice

# --- lease ---
MAX_SLOTS_PER_LEASE: Final = 64
MAX_GROUP_SIZE: Final = 1024
MAX_PROMPT_TOKENS: Final = 131_072
MAX_LEASES_PER_REPLY: Final = 64

# --- trace ---
MAX_TRACE_TOKENS: Final = 131_072
MAX_TRACE_BYTES: Final = 3 * 1024 * 1024
MAX_SPANS: Final = 512
MAX_REPLY_CHARACTERS: Final = 65_536  # what an environment is shown of one model turn

# --- proofs (SPEC 10, the public TOPLOC format) ---
PROOF_CHUNK_TOKENS: Final = 32
PROOF_TOP_K: Final = 128
PROOF_FIELD: Final = 65_497
PROOF_MIN_MODULUS_EXCLUSIVE: Final = 32_768
PROOF_MIN_JUDGED_TOKENS: Final = 8
MAX_PROOFS: Final = 4_096  # MAX_TRACE_TOKENS / PROOF_CHUNK_TOKENS

# --- verdict ---
MAX_CHECKS: Final = 64
MAX_TEXT_CHARACTERS: Final = 1_024
MAX_VERDICTS_PER_REPLY: Final = 256

# --- calibration ---
MAX_SCORE_BINS: Final = 128
MAX_ALTERNATIVES: Final = 8  # of one table
MAX_SCORE_NATS: Final = 5  # most that one value can say against a node, or for it
NODE_EVIDENCE_NATS: Final = 13.8155  # ln 10^6: an honest node reaches it once in a million at most

# --- log ---
MAX_LOG_ITEMS: Final = 1_048_576  # leases, submissions or verdicts of one epoch
MAX_LOG_CALIBRATIONS: Final = 64
MAX_EPOCH_BYTES: Final = 1024 * 1024 * 1024
