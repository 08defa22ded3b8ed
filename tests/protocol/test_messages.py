"""Messages and version negotiation. Single faults: tests/vectors/messages.json, frames.json."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import codec, limits, messages
from protocol.errors import Code, DecodeError
from protocol.messages import MESSAGES, Heartbeat, Returned, Version, expect, negotiate, open_body, pack


def test_numbers_are_dense_and_fit_in_a_byte() -> None:
    assert list(MESSAGES) == list(range(1, len(MESSAGES) + 1))
    assert len(set(MESSAGES.values())) == len(MESSAGES)


@given(st.binary(max_size=200))
def test_any_body_is_a_message_or_a_decode_error(body: bytes) -> None:
    try:
        message = open_body(body)
    except DecodeError:
        return
    assert pack(message) == body


def test_another_message_than_expected_is_named() -> None:
    with pytest.raises(DecodeError, match="expected Heartbeat, got Returned") as caught:
        expect(Heartbeat, pack(Returned()))
    assert caught.value.code is Code.UNEXPECTED_MESSAGE


def test_a_refused_node_reads_both_versions_and_what_to_upgrade() -> None:
    with pytest.raises(DecodeError) as caught:
        negotiate((Version(1, 3),), Version(2, 0), their_name="the node", our_name="the trainer")

    assert caught.value.code is Code.VERSION_MISMATCH
    assert str(caught.value) == (
        "the node speaks protocol 1.3, the trainer speaks 2.0: upgrade the node (git pull, pip install -e .)"
    )


def test_an_outdated_trainer_is_told_to_upgrade_itself() -> None:
    with pytest.raises(DecodeError, match=r"speaks protocol 2\.1, 3\.0, .* speaks 1\.0: upgrade the trainer"):
        negotiate((Version(2, 1), Version(3, 0)), Version(1, 0), their_name="the node", our_name="the trainer")


def test_a_node_that_speaks_nothing_is_told_to_upgrade() -> None:
    with pytest.raises(DecodeError, match=r"speaks protocol none, .* upgrade the node"):
        negotiate((), Version(1, 0), their_name="the node", our_name="the trainer")


versions = st.builds(Version, st.integers(0, 3), st.integers(0, 5))


@given(theirs=st.lists(versions, max_size=6).map(tuple), ours=versions)
def test_what_is_chosen_is_understood_by_both(theirs: tuple[Version, ...], ours: Version) -> None:
    try:
        chosen = negotiate(theirs, ours, their_name="they", our_name="we")
    except DecodeError:
        assert ours.major not in {each.major for each in theirs}
        return
    assert chosen.major == ours.major
    assert chosen.minor <= ours.minor
    assert any(each.major == chosen.major and each.minor >= chosen.minor for each in theirs)


def test_sides_of_different_versions_still_meet() -> None:
    """The ids name the frames and Hello, which no version changes; versions are told apart by Hello."""
    assert (messages.SESSION_PROTOCOL, messages.BLOB_PROTOCOL) == ("/rlcommons/session/1", "/rlcommons/blobs/1")
    assert [key for key, _ in codec.fields_of(messages.Hello)] == ["versions", "run", "software", "clock_ms", "engine"]


def test_a_blob_with_its_envelope_fits_into_a_frame() -> None:
    body = pack(messages.BlobReply(bytes(limits.MAX_BLOB_BYTES)))

    assert len(body) + 5 <= limits.MAX_FRAME_BYTES
    assert limits.MAX_TRACE_BYTES + 1024 <= limits.MAX_FRAME_BYTES
