"""A static copy of the policies as a source: broken transfers go on, lies cost nothing but time."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random

import pytest
import trio

from node.mirror import MirrorSource, check_mirror
from protocol import codec
from protocol.errors import Code, ConnectionLost, NetError, RemoteError, Unreachable, UsageError
from protocol.identity import Identity
from protocol.net import memory
from protocol.policy import Blob
from tests.node.fetching_node import FetchingNode, fetching_node
from tests.node.rig import EMBEDDED
from tests.node.small_trainer import Policy, SmallTrainer

DATA = Random(9).randbytes(300_000)
BLOB = Blob(hashlib.sha256(DATA).digest(), len(DATA))


@dataclass
class Server:
    """A folder over HTTP. `spoil` changes what is sent of a path; `cut` breaks off after so many bytes, once."""

    folder: Path
    url: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path and Range
    spoil: Callable[[str, bytes], bytes] | None = None
    cut: int | None = None
    ranges: bool = True

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range")
        self.asked.append((handler.path, wanted))
        path = self.folder / handler.path.removeprefix("/run/").lstrip("/")
        if not path.is_file():
            handler.send_error(404)
            return
        data = path.read_bytes()
        if self.spoil is not None:
            data = self.spoil(handler.path, data)
        first = 0
        if wanted and self.ranges:
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
            assert found is not None
            first = int(found[1])
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(data) - first))
        handler.end_headers()
        if self.cut is not None:
            data, self.cut = data[: first + self.cut], None
            handler.close_connection = True
        handler.wfile.write(data[first:])


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    server = Server(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            server.answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_address[1]}/run"
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def put(folder: Path, data: bytes = DATA, blob: Blob = BLOB) -> None:
    name = blob.digest.hex()
    path = folder / "blobs" / name[:2] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


@contextmanager
def mirror(server: Server) -> Iterator[MirrorSource]:
    source = MirrorSource(server.url, seconds=5)
    try:
        yield source
    finally:
        source.close()


def fetched(source: MirrorSource) -> bytes:
    async def fetch() -> bytes:
        return await source.fetch(BLOB, seconds=10)

    return trio.run(fetch)


def test_a_piece_comes_over_one_connection_after_another(tmp_path: Path) -> None:
    put(tmp_path)
    with served(tmp_path) as server, mirror(server) as source:
        assert fetched(source) == DATA
        assert fetched(source) == DATA
        assert server.asked[0] == (f"/run/blobs/{BLOB.digest.hex()[:2]}/{BLOB.digest.hex()}", None)


@pytest.mark.parametrize("ranges", [True, False])
def test_a_transfer_that_breaks_off_goes_on(tmp_path: Path, ranges: bool) -> None:
    put(tmp_path)
    with served(tmp_path) as server, mirror(server) as source:
        server.cut, server.ranges = 70_000, ranges
        assert fetched(source) == DATA
        assert server.asked[1][1] == f"bytes=70000-{len(DATA) - 1}"


def test_what_is_not_there_too_long_or_too_short_is_said(tmp_path: Path) -> None:
    with served(tmp_path) as server, mirror(server) as source:
        with pytest.raises(RemoteError) as caught:
            fetched(source)
        assert caught.value.code is Code.NOT_FOUND
        put(tmp_path, DATA + b"x")
        with pytest.raises(RemoteError, match="sends more than 300000 bytes"):
            fetched(source)
        put(tmp_path, DATA[:-1])
        with pytest.raises(RemoteError, match="has 299999 bytes"):
            fetched(source)


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(NetError, match=r"the mirror http://127\.0\.0\.1:1 does not answer") as caught:
        fetched(MirrorSource("http://127.0.0.1:1", seconds=2))
    assert isinstance(caught.value, Unreachable | ConnectionLost)


@pytest.mark.parametrize(
    "url", ["", "example.org/run", "file:///etc", "ftp://a/b", "http://", "http://a:x/", "http://a/?q"]
)
def test_what_is_no_url_of_a_folder_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="--mirror"):
        check_mirror(url)


# --- a node ---


def publish(policy: Policy, folder: Path) -> None:
    """As `rltrainer publish --mirror` lays it out; trainer/test_publish_mirror.py holds it to that."""
    for file in policy.manifest.files:
        data = (policy.folder / file.name).read_bytes()
        assert len(file.blobs) == 1
        put(folder, data, file.blobs[0])
    (folder / "latest.msgpack").write_bytes(codec.encode(policy.signed))


@asynccontextmanager
async def node_without_trainer(home: Path, trainer: SmallTrainer, source: MirrorSource) -> AsyncIterator[FetchingNode]:
    network, who = memory.Network(), Identity.generate()
    with trio.fail_after(60):
        async with network.host(trainer.identity) as theirs:
            address = trainer.address(theirs)
        async with network.host(who) as host, fetching_node(home, host, who, address, mirrors=[source]) as node:
            yield node


def test_a_node_whose_trainer_is_away_finds_policy_and_pieces_on_a_mirror(tmp_path: Path) -> None:
    trainer = SmallTrainer()
    publish(trainer.publish(EMBEDDED, 4), tmp_path / "mirror")

    async def scenario(source: MirrorSource) -> None:
        async with node_without_trainer(tmp_path / "home", trainer, source) as node:
            held = await node.until_ready(4)
            assert held.root == trainer.policies[4].manifest.root
            (said,) = node.said("policy_fetched")
            assert set(said.values["bytes_by_source"]) == {"mirror"}

    with served(tmp_path / "mirror") as server, mirror(server) as source:
        trio.run(scenario, source)


def test_a_trainer_is_said_to_be_away_once_it_was_called_in_vain(tmp_path: Path) -> None:
    trainer = SmallTrainer()
    publish(trainer.publish(EMBEDDED, 4), tmp_path / "mirror")

    async def scenario(source: MirrorSource) -> None:
        async with node_without_trainer(tmp_path / "home", trainer, source) as node:
            await node.until_ready(4)
            await node.follow(node.config.address)
            publish(trainer.publish(EMBEDDED, 5), tmp_path / "mirror")
            await node.until_ready(5)
            said = [event.text for event in node.said("manifest_found")]
            assert said == [
                f"policy 4 is out, says {source.name}, before the trainer was reached",
                f"policy 5 is out, says {source.name}, while the trainer is away",
            ]

    with served(tmp_path / "mirror") as server, mirror(server) as source:
        trio.run(scenario, source)


def test_a_mirror_that_lies_is_done_without(tmp_path: Path) -> None:
    trainer = SmallTrainer()
    policy = trainer.publish(EMBEDDED, 4)
    publish(policy, tmp_path / "mirror")

    async def scenario(source: MirrorSource) -> None:
        network, who = memory.Network(), Identity.generate()
        with trio.fail_after(60):
            async with (
                network.host(trainer.identity) as theirs,
                network.host(who) as host,
                fetching_node(tmp_path / "home", host, who, trainer.address(theirs), mirrors=[source]) as node,
            ):
                trainer.serve(theirs)
                node.follower.offer(policy.signed)
                await node.until_ready(4)
                assert {event.values["peer"] for event in node.said("blob_wrong")} == {source.name}

    with served(tmp_path / "mirror") as server, mirror(server) as source:
        server.spoil = lambda path, data: bytes(len(data)) if "/blobs/" in path else data
        trio.run(scenario, source)


def test_a_forged_manifest_on_a_mirror_is_refused(tmp_path: Path) -> None:
    trainer = SmallTrainer()
    publish(SmallTrainer().publish(EMBEDDED, 4), tmp_path / "mirror")

    async def scenario(source: MirrorSource) -> None:
        async with node_without_trainer(tmp_path / "home", trainer, source) as node:
            said = await node.until_said("manifest_refused")
            assert source.name in said.text
            assert node.follower.highest == -1

    with served(tmp_path / "mirror") as server, mirror(server) as source:
        trio.run(scenario, source)
