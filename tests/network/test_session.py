"""Requests, replies and notices over one stream, on sockets and in memory."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgpack
import pytest
import trio
from network_worlds import World

from protocol.errors import Code, ConnectionLost, DeadlineExceeded, DecodeError, Refused, RemoteError
from protocol.limits import MAX_IN_FLIGHT_REQUESTS, MAX_TEXT_CHARACTERS, SESSION_SILENCE_SECONDS
from protocol.net import session as session_module
from protocol.net.base import Stream
from protocol.net.session import MAX_BODY_BYTES, Session, decode_error, encode_error

TALK = "/test/talk/1"
REQUEST, REPLY, ERROR, NOTICE = range(4)


def message(kind: int, number: int, body: bytes = b"") -> bytes:
    return struct.pack(">BI", kind, number) + body


async def refuse_requests(body: bytes) -> bytes:
    raise RemoteError(Code.UNEXPECTED_MESSAGE, "nobody asks me")


async def ignore(body: bytes) -> None:
    pass


async def shout(body: bytes) -> bytes:
    return body.upper()


@asynccontextmanager
async def streams(world: World) -> AsyncIterator[tuple[Stream, Stream]]:
    """Both ends of one stream."""
    arrived, keep = trio.Event(), trio.Event()
    ends: list[Stream] = []

    async def hold(stream: Stream) -> None:
        ends.append(stream)
        arrived.set()
        await keep.wait()

    async with world.host() as server, world.host(listening=False) as client:
        server.serve(TALK, hold)
        ours = await client.open(server.addresses[0], TALK, seconds=5)
        await arrived.wait()
        yield ours, ends[0]
        keep.set()
        await ours.close()


@asynccontextmanager
async def sessions(world: World, on_request=shout, on_notice=ignore) -> AsyncIterator[tuple[Session, Session]]:
    """A running session at both ends; the second answers with `on_request` and `on_notice`."""
    async with streams(world) as (one, other), trio.open_nursery() as nursery:
        asking, answering = Session(one), Session(other)
        nursery.start_soon(asking.run, shout, ignore)
        nursery.start_soon(answering.run, on_request, on_notice)
        yield asking, answering
        await asking.close()
        await answering.close()


async def test_a_request_gets_its_reply(world: World) -> None:
    async with sessions(world) as (asking, answering):
        assert await asking.request(b"hello", seconds=5, what="greeting") == b"HELLO"
        assert await answering.request(b"both ends may ask", seconds=5, what="asking back") == b"BOTH ENDS MAY ASK"
        largest = bytes(MAX_BODY_BYTES)
        assert await asking.request(largest, seconds=20, what="asking at length") == largest
        with pytest.raises(ValueError, match="over the limit"):
            await asking.request(largest + b"x", seconds=5, what="asking too much")


async def test_requests_are_answered_as_they_are_done_not_in_order(world: World) -> None:
    order: list[bytes] = []
    second_done = trio.Event()

    async def answer(body: bytes) -> bytes:
        if body == b"first":
            await second_done.wait()
        return body

    async with sessions(world, answer) as (asking, _):

        async def ask(body: bytes) -> None:
            assert await asking.request(body, seconds=5, what="asking") == body
            order.append(body)
            second_done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, b"first")
            nursery.start_soon(ask, b"second")
        assert order == [b"second", b"first"]


async def test_a_refusal_carries_its_code_and_message(world: World) -> None:
    async def answer(body: bytes) -> bytes:
        raise RemoteError(Code.WRONG_RUN, "this is the run of another trainer" + "!" * 5000)

    async with sessions(world, answer) as (asking, _):
        with pytest.raises(Refused, match="this is the run of another trainer") as caught:
            await asking.request(b"hello", seconds=5, what="greeting")
        assert caught.value.code is Code.WRONG_RUN
        assert len(str(caught.value)) == MAX_TEXT_CHARACTERS


async def test_a_bug_in_a_handler_is_answered_internal_and_tells_the_peer_nothing(world: World) -> None:
    async def answer(body: bytes) -> bytes:
        if body == b"boom":
            raise RuntimeError("/home/me/secret")
        return body

    async with sessions(world, answer) as (asking, _):
        with pytest.raises(Refused) as caught:
            await asking.request(b"boom", seconds=5, what="asking")
        assert caught.value.code is Code.INTERNAL
        assert "secret" not in str(caught.value)
        assert await asking.request(b"go on", seconds=5, what="asking again") == b"go on"


async def test_a_reply_that_is_too_long_is_our_bug_and_answered_internal(world: World) -> None:
    async def answer(body: bytes) -> bytes:
        return bytes(MAX_BODY_BYTES + 1)

    async with sessions(world, answer) as (asking, _):
        with pytest.raises(Refused) as caught:
            await asking.request(b"", seconds=5, what="asking")
        assert caught.value.code is Code.INTERNAL


async def test_notices_arrive_in_order_and_a_bug_in_their_handler_ends_nothing(world: World) -> None:
    heard: list[bytes] = []
    complete = trio.Event()

    async def listen(body: bytes) -> None:
        if body == b"bad":
            raise RuntimeError("a bug")
        heard.append(body)
        if len(heard) == 100:
            complete.set()

    async with sessions(world, on_notice=listen) as (telling, _):
        for number in range(100):
            if number == 50:
                await telling.notify(b"bad")
            await telling.notify(str(number).encode())
        with trio.fail_after(5):
            await complete.wait()
        assert heard == [str(number).encode() for number in range(100)]


async def test_a_notice_handler_may_ask_the_peer(world: World) -> None:
    answers: list[bytes] = []
    done = trio.Event()

    async def ask_back(body: bytes) -> None:
        answers.append(await listening.request(body, seconds=5, what="asking back"))
        done.set()

    async with sessions(world, on_notice=ask_back) as (telling, listening):
        await telling.notify(b"news")
        with trio.fail_after(5):
            await done.wait()
        assert answers == [b"NEWS"]


async def test_an_unanswered_request_ends_at_its_deadline_and_its_late_reply_is_harmless(world: World) -> None:
    go_on = trio.Event()

    async def answer(body: bytes) -> bytes:
        if body == b"slow":
            await go_on.wait()
        return body

    async with sessions(world, answer) as (asking, _):
        with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s while waiting for the slow one"):
            await asking.request(b"slow", seconds=0.2, what="waiting for the slow one")
        go_on.set()
        for _ in range(3):
            assert await asking.request(b"quick", seconds=5, what="asking") == b"quick"


async def test_we_never_have_more_unanswered_requests_than_the_peer_allows(world: World) -> None:
    running = most = 0
    go_on = trio.Event()

    async def answer(body: bytes) -> bytes:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == MAX_IN_FLIGHT_REQUESTS:
            go_on.set()
        await go_on.wait()
        running -= 1
        return body

    async with sessions(world, answer) as (asking, _), trio.open_nursery() as nursery:
        for _ in range(3 * MAX_IN_FLIGHT_REQUESTS):
            nursery.start_soon(lambda: asking.request(b"x", seconds=10, what="asking"))
    assert most == MAX_IN_FLIGHT_REQUESTS


async def test_a_flood_of_requests_is_answered_busy(world: World) -> None:
    async def never(body: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with streams(world) as (raw, other), trio.open_nursery() as nursery:
        answering = Session(other)
        nursery.start_soon(answering.run, never, ignore)
        for number in range(1, MAX_IN_FLIGHT_REQUESTS + 3):
            await raw.send(message(REQUEST, number), seconds=5, what="flooding")
        for number in (MAX_IN_FLIGHT_REQUESTS + 1, MAX_IN_FLIGHT_REQUESTS + 2):
            answer = await raw.receive(seconds=5, what="waiting to be refused")
            assert answer[:5] == message(ERROR, number)
            assert decode_error(answer[5:]).code is Code.BUSY
        await answering.close()


async def test_large_requests_are_answered_busy_before_they_fill_our_memory(world: World) -> None:
    async def never(body: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with streams(world) as (raw, other), trio.open_nursery() as nursery:
        answering = Session(other)
        nursery.start_soon(answering.run, never, ignore)
        for number in range(1, 11):
            await raw.send(message(REQUEST, number, bytes(4_000_000)), seconds=10, what="flooding")
        answer = await raw.receive(seconds=10, what="waiting to be refused")
        assert decode_error(answer[5:]).code is Code.BUSY
        await answering.close()


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", Code.MALFORMED),
        (b"\x00\x00\x00\x01", Code.MALFORMED),
        (message(4, 1), Code.MALFORMED),
        (message(255, 0), Code.MALFORMED),
        (message(REQUEST, 0), Code.MALFORMED),
        (message(NOTICE, 1), Code.MALFORMED),
        (message(NOTICE, 0, bytes(session_module.MAX_NOTICE_BYTES + 1)), Code.TOO_LARGE),
        (message(REPLY, 7), Code.UNEXPECTED_MESSAGE),
        (message(ERROR, 7, encode_error(RemoteError(Code.BUSY, ""))), Code.UNEXPECTED_MESSAGE),
    ],
)
async def test_a_message_that_breaks_the_protocol_ends_the_session(world: World, frame: bytes, code: Code) -> None:
    async with streams(world) as (raw, other), trio.open_nursery() as nursery:
        nursery.start_soon(lambda: raw.send(frame, seconds=5, what="misbehaving"))
        with trio.fail_after(5), pytest.raises(RemoteError) as caught:
            await Session(other).run(shout, ignore)
        assert caught.value.code is code
        with pytest.raises(ConnectionLost):
            await raw.receive(seconds=5, what="waiting to be hung up on")


async def test_a_request_id_may_not_be_used_twice_at_once(world: World) -> None:
    async def never(body: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    async with streams(world) as (raw, other):
        for _ in range(2):
            await raw.send(message(REQUEST, 9), seconds=5, what="asking twice")
        with trio.fail_after(5), pytest.raises(RemoteError, match="request 9 came twice"):
            await Session(other).run(never, ignore)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="reserved byte"),
        pytest.param(msgpack.packb(["BUSY", "x"]), id="list"),
        pytest.param(msgpack.packb({"code": "BUSY"}), id="no message"),
        pytest.param(msgpack.packb({"message": "x", "code": "BUSY"}), id="swapped keys"),
        pytest.param(msgpack.packb({"code": 7, "message": "x"}), id="code of another type"),
        pytest.param(msgpack.packb({"code": "BUSY", "message": "x" * (MAX_TEXT_CHARACTERS + 1)}), id="too long"),
        pytest.param(msgpack.packb({"code": "BUSY", "message": "x"}) + b"\0", id="trailing byte"),
        pytest.param(b"\xde\x00\x02" + msgpack.packb({"code": "BUSY", "message": "x"})[1:], id="wide map"),
    ],
)
async def test_a_malformed_error_reply_ends_the_session(world: World, body: bytes) -> None:
    async with streams(world) as (raw, other), trio.open_nursery() as nursery:
        asking = Session(other)
        lost = trio.Event()

        async def ask() -> None:
            with pytest.raises(ConnectionLost):
                await asking.request(b"", seconds=5, what="asking")
            lost.set()

        nursery.start_soon(ask)
        request = await raw.receive(seconds=5, what="waiting for the request")
        await raw.send(message(ERROR, int.from_bytes(request[1:5], "big"), body), seconds=5, what="misbehaving")
        with trio.fail_after(5), pytest.raises(DecodeError):
            await asking.run(shout, ignore)
        with trio.fail_after(5):
            await lost.wait()


async def test_a_code_of_a_later_version_is_understood_as_a_refusal() -> None:
    refusal = decode_error(msgpack.packb({"code": "TEAPOT", "message": "short and stout"}))
    assert refusal.code is Code.INTERNAL
    assert "short and stout" in str(refusal) and "TEAPOT" in str(refusal)


async def test_pending_requests_fail_when_the_peer_goes_away(world: World) -> None:
    async with streams(world) as (one, other), trio.open_nursery() as nursery:
        asking = Session(one)
        failed = 0

        async def ask() -> None:
            nonlocal failed
            with pytest.raises(ConnectionLost, match="while asking"):
                await asking.request(b"", seconds=30, what="asking")
            failed += 1

        for _ in range(5):
            nursery.start_soon(ask)
        for _ in range(5):
            await other.receive(seconds=5, what="reading a request")
        await other.reset()
        with trio.fail_after(5), pytest.raises(ConnectionLost):
            await asking.run(shout, ignore)
        with trio.fail_after(5):
            while failed < 5:
                await trio.lowlevel.checkpoint()
        with pytest.raises(ConnectionLost, match=r"the session with .* ended while asking late"):
            await asking.request(b"", seconds=5, what="asking late")
        with pytest.raises(ConnectionLost):
            await asking.notify(b"")


async def test_closing_lets_run_return(world: World) -> None:
    async with streams(world) as (one, _), trio.open_nursery() as nursery:
        closing = Session(one)
        returned = trio.Event()

        async def run() -> None:
            await closing.run(shout, ignore)
            returned.set()

        nursery.start_soon(run)
        await closing.close()
        with trio.fail_after(5):
            await returned.wait()


async def test_silence_ends_the_session_and_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = SESSION_SILENCE_SECONDS
    if world.name == "p2p":  # real time
        seconds = 0.3
        monkeypatch.setattr(session_module, "SESSION_SILENCE_SECONDS", seconds)
    async with streams(world) as (_, other):
        began = trio.current_time()
        with pytest.raises(ConnectionLost, match=rf"was silent for {seconds} s: the session is dead"):
            await Session(other).run(shout, ignore)
        assert seconds <= trio.current_time() - began < seconds + 2


async def test_a_peer_that_reads_no_replies_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "REQUEST_SECONDS", 0.3)

    async def answer(body: bytes) -> bytes:
        return bytes(1_000_000)

    async with streams(world) as (raw, other):
        for number in range(1, 5):
            await raw.send(message(REQUEST, number), seconds=5, what="asking")
        with trio.fail_after(5), pytest.raises(ConnectionLost):
            await Session(other).run(answer, ignore)
