"""The network host on libp2p: TCP, Noise, yamux, one Ed25519 identity.

With hardening.py the only file that imports libp2p. A host restarts its swarm under the same
identity, on the same ports and with its handlers should it ever die. Not here: heartbeats and
reconnecting (the callers), the containment of libp2p's faults (hardening.py).
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from protocol.errors import DecodeError, Unreachable, UsageError
from protocol.identity import Identity
from protocol.net import hardening, multistream, unreachable
from protocol.net.backoff import backoff
from protocol.net.base import Address, Handler, Host, HostLimits, HostStatistics, Stream
from protocol.net.framing import ChannelClosed, FramedStream
from protocol.net.wire import Counters

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of libp2p's dependencies, at import
    from libp2p.custom_types import TProtocol
    from libp2p.tools.anyio_service import background_trio_service
    from libp2p.utils.address_validation import expand_wildcard_address
    from multiaddr import Multiaddr

log = logging.getLogger(__name__)

_GOODBYE_SECONDS = 2.0  # for peers to hear that we leave
_SILENT_SECONDS = 1.0  # no byte for so long after a question: the connection may be dead
_SETTLED_SECONDS = 60.0  # a swarm that lived so long restarts without delay


@asynccontextmanager
async def open_host(
    who: Identity, *, listen: Sequence[str] = (), limits: HostLimits | None = None
) -> AsyncIterator[Host]:
    """A running host; `listen` holds multiaddrs such as "/ip4/0.0.0.0/tcp/4001" (port 0: any free one).

    Raises UsageError when it cannot listen; the message names the port. On exit peers are told,
    connections closed and handlers cancelled.
    """
    host = _Host(who, [_listen_endpoint(address) for address in listen], limits or HostLimits())
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        try:
            await nursery.start(host.run)
            yield host
        except BaseException as error:  # kept, so that the nursery does not wrap it into a group
            failure = error
        with trio.CancelScope(deadline=trio.current_time() + _GOODBYE_SECONDS, shield=True):
            await host.say_goodbye()
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _listen_endpoint(address: str) -> tuple[str, int]:
    match address.split("/"):
        case ["", "ip4" | "ip6", host, "tcp", port] if port.isascii() and port.isdigit() and int(port) < 65_536:
            return host, int(port)
    raise UsageError(f"cannot listen on '{address}': it should look like /ip4/0.0.0.0/tcp/4001")


class _Host:
    def __init__(self, who: Identity, endpoints: list[tuple[str, int]], limits: HostLimits) -> None:
        self.node = who.node
        self.addresses: tuple[str, ...] = ()
        self._who = who
        self._keys = hardening.key_pair(who.private_bytes)
        self._endpoints = endpoints
        self._limits = limits
        self._counters = Counters()
        self._restarts = 0
        self._handlers: dict[str, Handler] = {}
        self._bans: dict[bytes, float] = {}  # node → trio time of its end
        self._dialling: dict[bytes, trio.Lock] = {}
        self._swarm: hardening.ContainedSwarm | None = None
        self._host: hardening.ContainedHost | None = None
        self._up = trio.Event()
        self._nursery: trio.Nursery | None = None

    # --- life ---

    async def run(self, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        """Keep a swarm alive until cancelled. Raises only what the first start raises."""
        delays = backoff(random.Random())
        started = False

        def on_started() -> None:
            nonlocal started
            if not started:
                task_status.started()
            started = True

        while True:
            since = trio.current_time()
            try:
                await self._run_swarm(on_started)
            except Exception as error:
                if not started:
                    raise _innermost(error) from None
                log.error("the swarm of %s died and restarts: %r", self._who.peer_id, _innermost(error))
            self._restarts += 1
            if trio.current_time() - since > _SETTLED_SECONDS:
                delays = backoff(random.Random())
            await trio.sleep(next(delays))

    async def _run_swarm(self, on_started: Any) -> None:
        swarm = hardening.ContainedSwarm(self._keys, self._limits, self._counters, self.is_banned)
        host = hardening.ContainedHost(swarm)
        for protocol, handler in self._handlers.items():
            _register(host, protocol, handler)
        try:
            async with background_trio_service(swarm), trio.open_nursery() as nursery:
                await swarm.event_background_nursery_created.wait()
                for endpoint in self._endpoints:
                    await swarm.listen_on(*endpoint)
                self._learn_addresses(swarm)
                self._swarm, self._host, self._nursery = swarm, host, nursery
                self._up.set()
                on_started()
                await trio.sleep_forever()
        finally:
            self._swarm = self._host = self._nursery = None
            self._up = trio.Event()
            for muxed in swarm.all_live():
                muxed.connection.fail("this node's network went down")
            with trio.CancelScope(deadline=trio.current_time() + _GOODBYE_SECONDS, shield=True):
                await host.close()

    def _learn_addresses(self, swarm: hardening.ContainedSwarm) -> None:
        bound = [address for listener in swarm.listeners.values() for address in listener.get_addrs()]
        # A restart must come back where peers know us.
        self._endpoints = [_endpoint(address) for address in bound]
        reachable = [one for address in bound for one in expand_wildcard_address(address)]
        self.addresses = tuple(f"{address}/p2p/{self._who.peer_id}" for address in reachable)

    async def say_goodbye(self) -> None:
        if self._swarm is not None:
            await self._swarm.close_gently()

    # --- serving ---

    def serve(self, protocol: str, handler: Handler) -> None:
        self._handlers[protocol] = handler
        if self._host is not None:
            _register(self._host, protocol, handler)

    # --- opening ---

    async def open(self, address: str, protocol: str, *, seconds: float) -> Stream:
        target = Address.parse(address)
        self._refuse_hopeless(target)
        with trio.move_on_after(seconds):
            while not self._up.is_set():
                await self._up.wait()
            return await self._open(target, protocol)
        raise unreachable.no_answer(target, seconds)

    def _refuse_hopeless(self, target: Address) -> None:
        if target.network == "memory":
            raise UsageError(f"{target} is an address inside another process's memory; this host dials TCP")
        if target.node == self.node:
            raise unreachable.is_ourselves(target)
        if self.is_banned(target.node):
            raise unreachable.is_banned(target)

    async def _open(self, target: Address, protocol: str) -> Stream:
        muxed, is_fresh = await self._connection(target)
        try:
            return await self._negotiate(muxed, target, protocol)
        except ChannelClosed as error:
            if is_fresh or not muxed.is_closed:
                raise unreachable.hung_up(target, str(error)) from None
        # The connection we had was dead without our knowing: try once more with a new one.
        muxed, _ = await self._connection(target)
        try:
            return await self._negotiate(muxed, target, protocol)
        except ChannelClosed as error:
            raise unreachable.hung_up(target, str(error)) from None

    async def _negotiate(self, muxed: hardening.MuxedConnection, target: Address, protocol: str) -> Stream:
        channel = muxed.connection.open()
        asked = trio.current_time()
        try:
            await multistream.propose(channel, protocol)
        except multistream.ProtocolNotSpoken:
            await channel.close()
            raise unreachable.does_not_speak(target, protocol) from None
        except multistream.NegotiationFailed as error:
            channel.abort()
            raise unreachable.no_node(target, str(error)) from None
        except trio.Cancelled:
            channel.abort()
            if muxed.connection.heard < asked < trio.current_time() - _SILENT_SECONDS:
                muxed.connection.fail("it did not answer")  # so that the next try dials anew
            raise
        except BaseException:
            channel.abort()
            raise
        return FramedStream(channel, target.node)

    async def _connection(self, target: Address) -> tuple[hardening.MuxedConnection, bool]:
        """A live connection and whether it is new. One dial a peer at a time; the others share it."""
        lock = self._dialling.setdefault(target.node, trio.Lock())
        try:
            async with lock:
                swarm = self._swarm
                if swarm is None:
                    raise unreachable.restarting(target)
                peer = hardening.peer_id_of(target.node)
                for muxed in swarm.live(peer):
                    return muxed, False
                with _naming_causes(target):
                    return await swarm.dial(target.host, target.port, peer), True
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._dialling.pop(target.node, None)

    # --- peers ---

    async def disconnect(self, peer: bytes) -> None:
        if self._swarm is None:
            return
        for muxed in self._swarm.live(hardening.peer_id_of(peer)):
            await muxed.close()

    def ban(self, peer: bytes, seconds: float) -> None:
        now = trio.current_time()
        self._bans = {node: end for node, end in self._bans.items() if end > now}
        self._bans[peer] = now + seconds
        if self._nursery is not None:
            self._nursery.start_soon(self.disconnect, peer)

    def is_banned(self, node: bytes) -> bool:
        return self._bans.get(node, 0.0) > trio.current_time()

    def connected(self) -> tuple[bytes, ...]:
        if self._swarm is None:
            return ()
        return tuple(dict.fromkeys(muxed.node for muxed in self._swarm.all_live()))

    def statistics(self) -> HostStatistics:
        counters, swarm = self._counters, self._swarm
        return HostStatistics(
            connections=len(swarm.all_live()) if swarm else 0,
            handshakes=swarm.door.handshakes if swarm else 0,
            refused=counters.refused,
            failed_handshakes=counters.failed_handshakes,
            handler_faults=counters.handler_faults,
            restarts=self._restarts,
            bytes_in=counters.bytes_in,
            bytes_out=counters.bytes_out,
        )


def _register(host: hardening.ContainedHost, protocol: str, handler: Handler) -> None:
    async def serve(net_stream: Any) -> None:
        await handler(FramedStream(hardening.channel_of(net_stream), net_stream.muxed_conn.node))

    host.set_stream_handler(TProtocol(protocol), serve)


@contextmanager
def _naming_causes(target: Address) -> Any:
    """Turn whatever a dial raises into Unreachable with its likely cause."""
    try:
        yield
    except hardening.WrongPeer as error:
        raise unreachable.other_peer(target, error.found) from None
    except OSError as error:
        raise _of_os_error(target, error) from None
    except ChannelClosed as error:
        raise unreachable.hung_up(target, str(error)) from None
    except (multistream.NegotiationFailed, DecodeError) as error:
        raise unreachable.no_node(target, str(error)) from None
    except Exception as error:  # libp2p's handshake raises many kinds on bad bytes
        raise unreachable.no_node(target, f"the handshake failed: {error!r}") from None


def _of_os_error(target: Address, error: OSError) -> Unreachable:
    cause: BaseException | None = error.__cause__  # trio keeps each attempt's error behind its own
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    cause = cause if isinstance(cause, OSError) else error
    if isinstance(cause, ConnectionRefusedError):
        return unreachable.nobody_listens(target)
    return unreachable.other(target, cause.strerror or str(cause))


def _endpoint(address: Multiaddr) -> tuple[str, int]:
    match str(address).split("/"):
        case ["", "ip4" | "ip6", host, "tcp", port]:
            return host, int(port)
    raise ValueError(f"{address} is not a TCP address")


def _innermost(error: BaseException) -> BaseException:
    """The first plain exception of nested groups: the service manager wraps what it re-raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
