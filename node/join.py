"""The composition root of `rlnode join`: makes the parts, connects them, runs them, stops them in order.

Everything that runs for long is started here and nowhere else. Not here: what the parts do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from random import Random
from typing import Final

import trio

from node import store as stores
from node.cards import chosen, held, look
from node.config import NodeConfig
from node.engine import CPU_SLOTS, Engine
from node.failures import foremost
from node.mirror import MirrorSource
from node.neighbours import Neighbours, meeting_point
from node.peers import Circle, PeerBook, PeerExchange, told_addresses
from node.relaying import Relaying
from node.report import STOPPED, Event, Level, Report, Status, noted
from node.scout import Scout
from node.serving import BlobServer
from node.session import Parts, TrainerClock, TrainerLink
from node.submit import Submitter
from node.swarm import Swarm
from node.verdicts import Verdicts
from node.weights import PolicyFollower
from node.worker import Terms, Worker
from protocol.errors import StorageError
from protocol.identity import Identity
from protocol.net.base import Host

OpenHost = Callable[[Identity], AbstractAsyncContextManager[Host]]

_GPU_SLOTS: Final = 128  # of transformers, which takes memory as it needs it and lowers them where there is none
_STATUS_SECONDS: Final = 1.0
_MIB: Final = 1024 * 1024
_MOST_NODES: Final = 256  # connected to this one: each asks a few others
_PEERS_NAME: Final = "peers.msgpack"


def make_engine(config: NodeConfig) -> Engine:
    """The engine that the configuration names. Raises EngineError."""
    threads = None if config.cards else config.threads
    if config.engine == "vllm":
        from node.vllm_engine import VllmEngine

        return VllmEngine(
            device=config.device,
            dtype=config.dtype,
            slots=config.slots,
            gpu_memory=config.gpu_memory,
            max_vram_bytes=config.max_vram_bytes,
            threads=threads,
            sleeps=config.turns is not None,
        )
    from node.transformers_engine import TransformersEngine

    slots = config.slots or (_GPU_SLOTS if config.cards else CPU_SLOTS)
    return TransformersEngine(device=config.device, dtype=config.dtype, slots=slots, threads=threads)


def open_p2p_host(config: NodeConfig) -> OpenHost:
    """Hosts that listen for other nodes, or only dial. Raises UsageError, once opened, when they cannot listen."""
    from protocol.net import p2p
    from protocol.net.base import HostLimits

    listen = (config.listen,) if config.serve else ()
    return lambda who: p2p.open_host(who, listen=listen, limits=HostLimits(connections=_MOST_NODES))


async def join(
    config: NodeConfig,
    report: Report,
    status: Status,
    stop: trio.Event,
    *,
    open_host: OpenHost | None = None,
    make: Callable[[NodeConfig], Engine] = make_engine,
) -> None:
    """Work for the run at `config.address` until `stop`. Raises the RLCommonsError that ended it."""
    report = noted(report, status)
    with stores.Home(config.home) as home, ExitStack() as cards:
        if config.cards:
            cards.enter_context(held(chosen(config.cards, await trio.to_thread.run_sync(look))))
        identity, made = home.load_or_make_identity()
        stores.save_address(config.home, config.address)
        _introduce(config, identity, made, report, status)
        store = home.run(config.address.run, config)
        _write_status(config, status)  # at once: what the last process wrote is no longer true
        try:
            async with (open_host or open_p2p_host(config))(identity) as host:
                with foremost():
                    await _run_parts(config, identity, store, host, report, status, stop, make)
        finally:
            status.state, status.connected = STOPPED, False
            _write_status(config, status)


def _introduce(config: NodeConfig, identity: Identity, made: bool, report: Report, status: Status) -> None:
    status.node = identity.peer_id
    status.run = config.address.run.hex()
    status.trainer = str(config.address)
    advice = f"; keep a copy: rlnode key backup FILE --home {config.home}" if made else ""
    text = f"this node is {identity.peer_id}{' (new)' if made else ''}, home {config.home}{advice}"
    report(Event("started", text, values={"node": identity.peer_id, "home": str(config.home)}))
    text = f"loading the libraries of the network and of the engine ({config.engine}); the trainer is called after that"
    report(Event("loading", text, values={"engine": config.engine}))


async def _run_parts(
    config: NodeConfig,
    identity: Identity,
    store: stores.RunStore,
    host: Host,
    report: Report,
    status: Status,
    stop: trio.Event,
    make: Callable[[NodeConfig], Engine],
) -> None:
    address, clock, random = config.address, TrainerClock(), Random()
    async with trio.open_nursery() as nursery:
        circle = Circle(address.run, address.trainer, clock.now_ms)
        book = PeerBook(store.folder / _PEERS_NAME, identity.node, circle)
        mirrors = [MirrorSource(url, seconds=config.dial_seconds) for url in config.mirrors]
        swarm = Swarm(nursery, host, config, book, report, random, mirrors=mirrors)
        server = BlobServer(store, book, config.upload_cap * _MIB, status)
        swarm.on_coming = server.tell_coming
        listening = told_addresses(host.addresses) if config.serve else ()
        if listening:
            server.start(host)
        terms = Terms(address.run, address.trainer, identity)
        worker = Worker(terms, config, store, make, clock.now_ms, report, status, random)

        def ready(held: stores.HeldPolicy) -> None:
            worker.policy_ready(held)
            book.stir()  # so that others hear soon who has it

        follower = PolicyFollower(
            address.run,
            address.trainer,
            store,
            swarm,
            ready,
            report,
            status,
            piece_here=server.tell,
            now_ms=clock.now_ms,
        )
        relays = (address.dial, *config.relays)
        relaying = Relaying(host, listening, relays, book.stir, report, status, random)
        where = relaying.addresses
        exchange = PeerExchange(book, where, lambda: store.held, lambda: follower.latest, report)
        points = tuple(meeting_point(nursery, host, relay, config.dial_seconds) for relay in config.relays)
        neighbours = Neighbours(
            swarm, server, book, follower, where, lambda: store.held, clock.now_ms, report, random, points=points
        )
        scout = Scout(swarm, follower, clock.now_ms, status, report, random)
        verdicts = Verdicts(address.run, address.trainer, identity.node, store, report, status)
        submitter = Submitter(terms, config, store, worker, verdicts, report, status)
        parts = Parts(store, worker, follower, submitter, verdicts, exchange)
        link = TrainerLink(address, host, config, parts, clock, report, status, random)
        link.resume()
        nursery.start_soon(worker.run)
        nursery.start_soon(follower.run)
        nursery.start_soon(scout.run)
        nursery.start_soon(relaying.run)
        nursery.start_soon(neighbours.run)
        nursery.start_soon(link.run)
        nursery.start_soon(_keep_status, config, status)
        await stop.wait()
        await _stop(worker, link, config, report, status)
        nursery.cancel_scope.cancel()


async def _stop(worker: Worker, link: TrainerLink, config: NodeConfig, report: Report, status: Status) -> None:
    """Give leases back, send what is finished; what does not make it in time waits on the disk."""
    status.state = "stopping"
    report(Event("stopping", "stopping: sending what is finished, giving leases back"))
    worker.stop("the node is stopping")
    with trio.move_on_after(config.stop_seconds):
        await link.flush()
    if unsent := link.unsent:
        text = f"{unsent} traces are kept on the disk and sent at the next start"
        report(Event("kept", text, Level.WARNING, {"unsent": unsent}))


async def _keep_status(config: NodeConfig, status: Status) -> None:
    while True:
        await trio.to_thread.run_sync(_write_status, config, status)
        await trio.sleep(_STATUS_SECONDS)


def _write_status(config: NodeConfig, status: Status) -> None:
    try:
        stores.write_status(config.home, status.plain())
    except StorageError:
        return  # a full disk is told where something is lost by it
