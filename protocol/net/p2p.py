"""The network host on libp2p: TCP, Noise, yamux, one Ed25519 identity.

With hardening.py the only file that imports libp2p. A host restarts its swarm under the same
identity, on the same ports and with its handlers should it ever die. Not here: heartbeats and
reconnecting (the callers), the containment of libp2p's faults (hardening.py).
"""

from __future__ import annotations

import logging
import random
import time
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import trio

from protocol.errors import DecodeError, NetError, Unreachable, UsageError
from protocol.identity import Identity
from protocol.net import circuit, hardening, multistream, protobuf, punch, unreachable
from protocol.net.backoff import backoff
from protocol.net.base import (
    Address,
    Handler,
    Host,
    HostLimits,
    HostStatistics,
    RelayLimits,
    Reservation,
    Stream,
    listen_endpoint,
)
from protocol.net.door import Refused
from protocol.net.framing import ChannelClosed, FramedStream
from protocol.net.protobuf import Malformed
from protocol.net.relay import Relay
from protocol.net.wire import Counters
from protocol.net.yamux import Channel

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
_DRAIN_SECONDS = 60.0  # for streams over a relay to end, once there is a direct connection
_DRAIN_LOOK_SECONDS = 0.5
_IDENTIFY_BYTES = 64 * 1024
_OBSERVED_ADDRESS = 4  # identify's field


@asynccontextmanager
async def open_host(
    who: Identity, *, listen: Sequence[str] = (), limits: HostLimits | None = None
) -> AsyncIterator[Host]:
    """A running host; `listen` holds multiaddrs such as "/ip4/0.0.0.0/tcp/4001" (port 0: any free one).

    Raises UsageError when it cannot listen; the message names the port. On exit peers are told,
    connections closed and handlers cancelled.
    """
    host = _Host(who, [listen_endpoint(address) for address in listen], limits or HostLimits())
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
        self._relay: Relay | None = None
        self._relays: set[bytes] = set()  # where a place was asked for: they may bring connections
        self._punches: Counter[hardening.MuxedConnection] = Counter()  # asked for by who came through a relay
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
        for name, raw in ((circuit.HOP, self._on_hop), (circuit.STOP, self._on_stop), (circuit.DCUTR, self._on_punch)):
            host.set_stream_handler(TProtocol(name), raw)
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
        if self.node in (target.node, target.relay):
            raise unreachable.is_ourselves(target)
        if self.is_banned(target.node) or (target.relay is not None and self.is_banned(target.relay)):
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

    async def _through(self, target: Address, via: Address) -> hardening.MuxedConnection:
        """A connection over a stream that the relay splices to the target."""
        relay, _ = await self._connection(via)
        swarm = self._swarm
        if swarm is None:
            raise unreachable.restarting(target)
        channel = await self._hop(relay, target, via)
        try:
            await protobuf.send(channel, circuit.connect(target.node))
            # The relay itself waits for the target in the meantime.
            circuit.require_hop_ok(await circuit.receive(channel, 2 * circuit.ANSWER_SECONDS))
        except BaseException as error:
            channel.abort()
            raise _of_relay(target, via, error) from None
        await self._learn_where_seen(relay)
        return await swarm.dial_through(relay, channel, hardening.peer_id_of(target.node))

    async def _hop(self, relay: hardening.MuxedConnection, target: Address, via: Address) -> Channel:
        """A stream of the relay's own protocol."""
        channel = relay.connection.open()
        try:
            await multistream.propose(channel, circuit.HOP)
        except BaseException as error:
            channel.abort()
            raise _of_relay(target, via, error) from None
        return channel

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
                    if target.via is not None:
                        return await self._through(target, target.via), True
                    return await swarm.dial(target.host, target.port, peer), True
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._dialling.pop(target.node, None)

    # --- behind NAT: a place at a relay, and connections that come through it ---

    def relay(self, limits: RelayLimits, admits: Callable[[bytes], bool]) -> None:
        self._relay = Relay(limits, admits, self._open_stop, self._is_here, self._relay_addresses, self._counters)

    async def reserve(self, relay: str, *, seconds: float) -> Reservation:
        via = Address.parse(relay)
        self._refuse_hopeless(via)
        with trio.move_on_after(seconds):
            return await self._reserve(via)
        raise unreachable.no_answer(via, seconds)

    async def _reserve(self, via: Address) -> Reservation:
        muxed, _ = await self._connection(via)
        channel = await self._hop(muxed, via, via)
        try:
            await protobuf.send(channel, circuit.reserve())
            fields = await circuit.receive(channel)
            circuit.require_hop_ok(fields)
            left = circuit.reservation_expires(fields) - time.time()
        except BaseException as error:
            channel.abort()
            raise _of_relay(via, via, error) from None
        await channel.close()
        self._relays.add(via.node)
        await self._learn_where_seen(muxed)
        # By number, because nobody looks up names for a stranger.
        host, port = muxed.get_remote_address() or (via.host, via.port)
        network = "ip6" if ":" in host else "ip4"
        return Reservation(str(Address(network, host, port, self.node, via.node)), max(left, 0.0))

    async def seen_as(self, peer: str, *, seconds: float) -> str | None:
        target = Address.parse(peer)
        self._refuse_hopeless(target)
        with trio.move_on_after(seconds):
            muxed, _ = await self._connection(target)
            await self._learn_where_seen(muxed)
            return None if muxed.seen_at is None else muxed.seen_at[0]
        raise unreachable.no_answer(target, seconds)

    async def _learn_where_seen(self, muxed: hardening.MuxedConnection) -> None:
        """Ask by identify where a peer sees us come from; one that does not say is asked no more."""
        if muxed.seen_at is not None or muxed.is_relayed:
            return
        channel = muxed.connection.open()
        try:
            with trio.fail_after(circuit.ANSWER_SECONDS):
                await multistream.propose(channel, hardening.IDENTIFY)
                fields = await protobuf.receive(channel, _IDENTIFY_BYTES)
            observed = protobuf.texts(fields, _OBSERVED_ADDRESS)
            muxed.seen_at = circuit.endpoint_of(observed[-1]) if observed else None
        except (multistream.NegotiationFailed, ChannelClosed, Malformed, trio.TooSlowError) as error:
            log.debug("%s does not say where it sees us: %s", muxed.peer_id, error)
        finally:
            channel.abort()

    def is_relayed(self, peer: bytes) -> bool:
        live = self._swarm.live(hardening.peer_id_of(peer)) if self._swarm is not None else []
        return bool(live) and live[0].is_relayed

    async def _on_stop(self, net_stream: Any) -> None:
        """A relay where we have a place brings somebody."""
        channel, relay, swarm = hardening.channel_of(net_stream), net_stream.muxed_conn, self._swarm
        if relay.is_relayed or relay.node not in self._relays or swarm is None:
            channel.abort()
            return
        try:
            fields = await circuit.receive(channel)
            is_connect = protobuf.number(fields, 1, -1) == circuit.StopKind.CONNECT
            source = circuit.stop_peer(fields)
            if not is_connect or source == self.node or self.is_banned(source):
                await protobuf.send(channel, circuit.stop_status(circuit.Status.PERMISSION_DENIED))
                return
            await protobuf.send(channel, circuit.stop_status(circuit.Status.OK))
            await swarm.admit_through(relay, channel, hardening.peer_id_of(source), self._met_through)
        except Refused as error:
            self._counters.refused += 1
            log.debug("refused a connection through %s: %s", relay.peer_id, error)
            channel.abort()
        except Exception as error:  # whatever a stranger's bytes make libp2p raise
            self._counters.failed_handshakes += 1
            log.debug("a handshake through %s failed: %r", relay.peer_id, error)
            channel.abort()

    # --- hole punching ---

    def _met_through(self, muxed: hardening.MuxedConnection) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(self._ask_to_punch, muxed)

    async def _ask_to_punch(self, muxed: hardening.MuxedConnection) -> None:
        """Try to have a direct connection instead of this one."""
        try:
            for _ in range(punch.TRIES):
                if not self.is_relayed(muxed.node) or await self._ask_once(muxed):
                    return
            self._counters.punches_failed += 1
        except multistream.ProtocolNotSpoken:
            log.debug("%s punches no holes", muxed.peer_id)
        except Exception as error:  # the other side's bytes; the connection through the relay stays
            self._counters.punches_failed += 1
            log.debug("no direct connection with %s: %r", muxed.peer_id, error)

    async def _ask_once(self, muxed: hardening.MuxedConnection) -> bool:
        channel = muxed.connection.open()
        try:
            with trio.fail_after(circuit.ANSWER_SECONDS):
                await multistream.propose(channel, circuit.DCUTR)
            theirs = await punch.ask(channel, self._seen(muxed))
        except BaseException:
            channel.abort()
            raise
        await channel.close()
        return await self._meet(muxed, theirs, initiator=False)

    async def _on_punch(self, net_stream: Any) -> None:
        """Somebody whom we reached through a relay wants a direct connection."""
        channel, muxed = hardening.channel_of(net_stream), net_stream.muxed_conn
        # Only who was dialled is asked, and no more often than an honest peer asks: it makes us dial.
        if not (muxed.is_relayed and muxed.is_initiator) or self._punches[muxed] >= punch.TRIES:
            channel.abort()
            return
        self._punches = Counter({one: count for one, count in self._punches.items() if not one.is_closed})
        self._punches[muxed] += 1
        try:
            theirs = await punch.answer(channel, self._seen(muxed))
            await self._meet(muxed, theirs, initiator=True)
        except (Malformed, trio.TooSlowError) as error:
            log.debug("hole punching with %s ended: %r", muxed.peer_id, error)
            channel.abort()

    def _seen(self, muxed: hardening.MuxedConnection) -> list[punch.Endpoint]:
        """Where others see the connection come from that this one goes through."""
        seen = muxed.relay.seen_at if muxed.relay is not None else None
        return [] if seen is None else [seen]

    async def _meet(
        self, muxed: hardening.MuxedConnection, theirs: Sequence[punch.Endpoint], *, initiator: bool
    ) -> bool:
        """Dial the other side from the port that it was told of. Whether there is a direct connection now."""
        local, swarm = muxed.relay.get_local_address() if muxed.relay else None, self._swarm
        if local is None or swarm is None or not theirs:
            return False

        async def dial(host: str, port: int) -> Any:
            return await swarm.dial_from(local, host, port, initiator=initiator)

        wire = await punch.meet(dial, theirs)
        if wire is None:
            return False
        try:
            await swarm.join(wire, muxed.peer_id)
        except Exception as error:  # whatever a stranger's bytes make libp2p raise
            self._counters.failed_handshakes += 1
            log.debug("a punched connection with %s failed: %r", muxed.peer_id, error)
            return False
        self._counters.punched += 1
        if self._nursery is not None:
            self._nursery.start_soon(_drain, muxed)
        return True

    # --- being a relay ---

    async def _on_hop(self, net_stream: Any) -> None:
        channel, muxed = hardening.channel_of(net_stream), net_stream.muxed_conn
        if self._relay is None:
            channel.abort()
            return
        await self._relay.serve(channel, muxed.node, is_relayed=muxed.is_relayed)

    async def _open_stop(self, node: bytes) -> Channel | None:
        for muxed in self._swarm.live(hardening.peer_id_of(node)) if self._swarm is not None else []:
            if not muxed.is_relayed:
                channel = muxed.connection.open()
                try:
                    await multistream.propose(channel, circuit.STOP)
                except BaseException:
                    channel.abort()
                    raise
                return channel
        return None

    def _is_here(self, node: bytes) -> bool:
        live = self._swarm.live(hardening.peer_id_of(node)) if self._swarm is not None else []
        return any(not muxed.is_relayed for muxed in live)

    def _relay_addresses(self) -> list[bytes]:
        parsed = [Address.parse(each) for each in self.addresses]
        return [circuit.address_bytes(each.host, each.port, each.node) for each in parsed]

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
            reservations=self._relay.places.reservations if self._relay else 0,
            circuits=self._relay.places.circuits if self._relay else 0,
            relayed_bytes=counters.relayed_bytes,
            relay_refusals=counters.relay_refusals,
            punched=counters.punched,
            punches_failed=counters.punches_failed,
        )


async def _drain(muxed: hardening.MuxedConnection) -> None:
    """Close a connection through a relay once it carries nothing, or when that takes long."""
    with trio.move_on_after(_DRAIN_SECONDS):
        while muxed.connection.channels and not muxed.is_closed:
            await trio.sleep(_DRAIN_LOOK_SECONDS)
    await muxed.close()


def _register(host: hardening.ContainedHost, protocol: str, handler: Handler) -> None:
    async def serve(net_stream: Any) -> None:
        await handler(FramedStream(hardening.channel_of(net_stream), net_stream.muxed_conn.node))

    host.set_stream_handler(TProtocol(protocol), serve)


@contextmanager
def _naming_causes(target: Address) -> Any:
    """Turn whatever a dial raises into Unreachable with its likely cause."""
    try:
        yield
    except NetError:
        raise
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


def _of_relay(target: Address, via: Address, error: BaseException) -> BaseException:
    """What to raise when talking to a relay failed: a cause, or what is none of ours to name."""
    match error:
        case circuit.Declined():
            return unreachable.relay_declined(target, via, str(error))
        case multistream.ProtocolNotSpoken():
            return unreachable.relay_declined(target, via, "it is no relay")
        case Malformed() | multistream.NegotiationFailed() | ChannelClosed() | trio.TooSlowError():
            return unreachable.relay_declined(target, via, str(error) or "it did not answer")
    return error


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
