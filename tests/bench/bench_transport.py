"""Bulk over our streams against bulk over HTTP: two processes on loopback, in the same run.

    python tests/bench/bench_transport.py [--mib 256] [--rounds 3]

Ours: 4 MiB frames over libp2p (Noise, yamux), encrypted and authenticated. HTTP: uvicorn sends,
httpx streams, in plaintext. The ratio is the median over the rounds, taken in turns; CPU seconds
are both processes'. Not measured: a real network, where either is far above the link.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

BULK = "/bench/bulk/1"
FRAME_BYTES = 4 * 1024 * 1024


def serve_p2p() -> None:
    import trio

    from protocol.identity import Identity
    from protocol.net import p2p
    from protocol.net.base import Stream

    frame = os.urandom(FRAME_BYTES)

    async def send_frames(stream: Stream) -> None:
        count = int(await stream.receive(seconds=60, what="waiting for an order"))
        for _ in range(count):
            await stream.send(frame, seconds=60, what="sending a frame")

    async def main() -> None:
        async with p2p.open_host(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",)) as host:
            host.serve(BULK, send_frames)
            print(host.addresses[0], flush=True)
            await trio.to_thread.run_sync(sys.stdin.read)

    trio.run(main)


def serve_http() -> None:
    import socket
    import threading

    import uvicorn
    from fastapi import FastAPI
    from fastapi.responses import StreamingResponse

    frame = os.urandom(FRAME_BYTES)
    app = FastAPI()

    @app.get("/bulk/{count}")
    async def bulk(count: int) -> StreamingResponse:
        async def frames() -> AsyncIterator[bytes]:
            for _ in range(count):
                for at in range(0, FRAME_BYTES, 65_536):
                    yield frame[at : at + 65_536]

        return StreamingResponse(frames(), media_type="application/octet-stream")

    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    print(f"http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    server.run(sockets=[bound])


def pull_p2p(address: str, frames: int) -> None:
    import trio

    from protocol.identity import Identity
    from protocol.net import p2p

    async def main() -> None:
        async with p2p.open_host(Identity.generate()) as host:
            stream = await host.open(address, BULK, seconds=10)
            await stream.send(str(frames).encode(), seconds=10, what="ordering")
            for _ in range(frames):
                assert len(await stream.receive(seconds=60, what="receiving a frame")) == FRAME_BYTES
            await stream.close()

    trio.run(main)


def pull_http(address: str, frames: int) -> None:
    import httpx

    received = 0
    with httpx.Client() as client, client.stream("GET", f"{address}/bulk/{frames}", timeout=60) as response:
        for chunk in response.iter_raw():
            received += len(chunk)
    assert received == frames * FRAME_BYTES


@contextmanager
def server(kind: str) -> Iterator[tuple[int, str]]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.communicate()


def measure(kind: str, pid: int, address: str, frames: int) -> tuple[float, float]:
    """(MB/s, CPU seconds of both processes)."""
    import psutil

    both = [psutil.Process(), psutil.Process(pid)]

    def cpu() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in both)

    began, cpu_began = time.perf_counter(), cpu()
    (pull_p2p if kind == "p2p" else pull_http)(address, frames)
    seconds = time.perf_counter() - began
    return frames * FRAME_BYTES / seconds / 1e6, cpu() - cpu_began


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--mib", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--serve", choices=["p2p", "http"], help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.serve:
        return serve_p2p() if chosen.serve == "p2p" else serve_http()
    frames = chosen.mib * 1024 * 1024 // FRAME_BYTES
    results: dict[str, list[tuple[float, float]]] = {"p2p": [], "http": []}
    with server("p2p") as p2p_server, server("http") as http_server:
        for kind, (pid, address) in (("p2p", p2p_server), ("http", http_server)):
            measure(kind, pid, address, 1)  # imports and warm-up
        for _ in range(chosen.rounds):
            for kind, (pid, address) in (("p2p", p2p_server), ("http", http_server)):
                results[kind].append(measure(kind, pid, address, frames))
    ratio = statistics.median(ours[0] / http[0] for ours, http in zip(results["p2p"], results["http"], strict=True))
    print("| bulk, MiB | libp2p MB/s | CPU s | uvicorn + httpx MB/s | CPU s | ratio |")
    cells = [statistics.median(column) for kind in ("p2p", "http") for column in zip(*results[kind], strict=True)]
    print(f"| {chosen.mib} | {cells[0]:.0f} | {cells[1]:.2f} | {cells[2]:.0f} | {cells[3]:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
