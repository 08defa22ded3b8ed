"""What a policy costs the trainer's link when many nodes fetch it at once, and how long the last of them takes.

    sudo python tests/bench/bench_swarm.py [--mb 269] [--nodes 8] [--rate 10] [--folder DIR]

Every process has a network namespace of its own behind a link of `--rate` MB/s each way (tc tbf): the real gateway, and
nodes that do all that `rlnode join` does but draw. First one node alone fetches a policy of `--mb` MB, then all of them
the next one. Bars: the trainer sends at most 2.2 times the policy's size, bytes on the wire; the last node takes at
most 2.5 times as long as the lone one. Skipped, with the reason, where namespaces are not allowed. Where processors are
busy and not links, times say little: how busy they were is printed, and a smaller `--rate` tells. Not measured:
distance, loss.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

UPLOAD_BAR = 2.2
TIME_BAR = 2.5
BUSY = 0.9  # of the processors' time: then it is theirs that is measured
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
SMALL = 1_000_000
PREFIX = f"rlb{os.getpid()}"
TRAINER_IP = "10.77.0.1"


# --- a network in namespaces ---


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def network(count: int, rate: float) -> Iterator[list[str]]:
    """Names of namespaces, each with the address 10.77.0.(1 + n), on one switch. `rate`: MB/s each way."""
    hub, names = f"{PREFIX}-hub", [f"{PREFIX}-{number}" for number in range(count)]
    made: list[str] = []
    try:
        for name in (hub, *names):
            ip("netns", "add", name)
            made.append(name)
        ip("-n", hub, "link", "add", "switch", "type", "bridge")
        ip("-n", hub, "link", "set", "switch", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            ip("-n", hub, "link", "set", port, "master", "switch", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
            limit(name, "eth0", rate)
            limit(hub, port, rate)
        yield names
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def limit(namespace: str, device: str, rate: float) -> None:
    shape = ["root", "tbf", "rate", f"{rate * 8:g}mbit", "burst", "256kb", "latency", "100ms"]
    words = ["tc", "-n", namespace, "qdisc", "add", "dev", device, *shape]
    subprocess.run(words, check=True, capture_output=True)


def sent(namespace: str) -> int:
    """Bytes that have left a namespace."""
    words = ["ip", "netns", "exec", namespace, "cat", "/sys/class/net/eth0/statistics/tx_bytes"]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def why_not() -> str:
    """Why namespaces cannot be used here; empty when they can."""
    if not all(shutil.which(tool) for tool in ("ip", "tc")):
        return "ip and tc (iproute2) are not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network(1, 10):
            return ""
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}"


# --- processes ---


@contextmanager
def process(namespace: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = ["ip", "netns", "exec", namespace, sys.executable, *words]
    started = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield started
    finally:
        assert started.stdin is not None
        started.stdin.close()  # each of them ends when it loses its parent
        try:
            started.wait(20)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()


def serve_node(home: Path, address: str) -> None:
    """A node without an engine; prints a line for each policy it has."""
    import trio

    from node.swarm import Pace
    from protocol.identity import Identity
    from protocol.net.p2p import open_host
    from protocol.run import RunAddress
    from tests.node.fetching_node import fetching_node

    async def main() -> None:
        who, where = Identity.generate(), RunAddress.parse(address)
        async with (
            open_host(who, listen=("/ip4/0.0.0.0/tcp/0",)) as host,
            fetching_node(home, host, who, where, pace=Pace(), seed=os.getpid()) as node,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(node.follow, where)
            nursery.start_soon(tell)
            shown = 0
            while True:
                for event in node.said("policy_fetched")[shown:]:
                    print(json.dumps({"at": time.time(), **event.values}), flush=True)
                    shown += 1
                await node.changed.wait()

    async def tell() -> None:
        await trio.to_thread.run_sync(sys.stdin.read)
        os._exit(0)

    trio.run(main)


def until_fetched(node: subprocess.Popen[str], version: int) -> dict[str, object]:
    assert node.stdout is not None
    for line in node.stdout:
        found: dict[str, object] = json.loads(line)
        if found["version"] == version:
            return found
    raise RuntimeError("a node ended before it had the policy")


def make_run(folder: Path) -> Path:
    run = folder / "run"
    words = ["-m", "trainer.cli", "init", str(run), "--set", f"listen=/ip4/{TRAINER_IP}/tcp/4001"]
    subprocess.run([sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True)
    return run


def publish(run: Path, version: int, size: int) -> float:
    """Publish a policy of about `size` bytes that shares nothing with others; the time it was written down."""
    from protocol.policy import policy_root
    from trainer.ledger import Ledger
    from trainer.rundir import RunFolder

    folder = RunFolder(run)
    shutil.copytree(folder.policy(0), folder.policy(version))
    (folder.policy(version) / "filler.txt").write_bytes(os.urandom(size))
    root = policy_root(folder.policy(version))
    ledger = Ledger(folder.ledger)
    with ledger.write():
        ledger.add_policy(version, root, 0)
    ledger.close()
    return time.time()


@dataclass
class Found:
    """Times in seconds, sizes in bytes. `busy`: share of all processors' time while all nodes fetch; `ours`: of it."""

    lone: float
    each: list[float]
    uploaded: int
    given: dict[str, int]  # that the nodes had, by kind of source
    busy: float
    ours: float


def cpu_seconds() -> tuple[float, float, float]:
    """(all processors', idle, this bench's processes')."""
    import psutil

    total = psutil.cpu_times()
    ours = 0.0
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            ours += sum(each.cpu_times()[:2])
    return sum(total[:8]), total.idle + total.iowait, ours


def measure(namespaces: list[str], folder: Path, size: int) -> Found:
    run = make_run(folder)
    with ExitStack() as stack:
        stack.enter_context(process(namespaces[0], "-m", "trainer.gateway", str(run)))
        while not (run / "address").exists():
            time.sleep(0.1)
        address = (run / "address").read_text().strip()

        def start(number: int) -> subprocess.Popen[str]:
            words = (__file__, "--node", str(folder / f"home{number}"), address)
            return stack.enter_context(process(namespaces[number], *words))

        nodes = [start(1)]
        until_fetched(nodes[0], 0)
        publish(run, 1, size)
        # From the manifest on: describing and signing are not the network's.
        lone = float(str(until_fetched(nodes[0], 1)["seconds"]))
        print(f"the lone node took {lone:.1f} s", flush=True)
        publish(run, 2, SMALL)  # so that the others need not fetch the large one before they begin
        nodes += [start(number) for number in range(2, len(namespaces))]
        for node in nodes:
            until_fetched(node, 2)
        time.sleep(3)  # lists of nodes settle
        before, cpu = sent(namespaces[0]), cpu_seconds()
        publish(run, 3, size)
        done = [until_fetched(node, 3) for node in nodes]
        all_time, idle, ours = (after - then for after, then in zip(cpu_seconds(), cpu, strict=True))
        given: dict[str, int] = {}
        for each in done:
            for kind, count in each["bytes_by_source"].items():  # type: ignore[attr-defined]
                given[kind] = given.get(kind, 0) + count
        seconds = [float(str(each["seconds"])) for each in done]
        uploaded = sent(namespaces[0]) - before
        return Found(lone, seconds, uploaded, given, 1 - idle / all_time, ours / all_time)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--mb", type=float, default=269)
    arguments.add_argument("--nodes", type=int, default=8)
    arguments.add_argument("--rate", type=float, default=10.0)
    arguments.add_argument("--folder", type=Path, help="for runs and homes (default: a temporary one)")
    arguments.add_argument("--node", nargs=2, metavar=("HOME", "ADDRESS"), help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.node:
        serve_node(Path(chosen.node[0]), chosen.node[1])
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # namespaces are removed then too
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    size = int(chosen.mb * 1e6)
    with (
        tempfile.TemporaryDirectory(dir=chosen.folder) as folder,
        network(chosen.nodes + 1, chosen.rate) as namespaces,
    ):
        found = measure(namespaces, Path(folder), size)
    last, median = max(found.each), statistics.median(found.each)
    times, ratio = found.uploaded / size, last / found.lone
    print("| nodes | policy MB | link MB/s | lone node s | median s | last s | last / lone | trainer sent / size |")
    print(
        f"| {chosen.nodes} | {chosen.mb:g} | {chosen.rate:g} | {found.lone:.1f} | {median:.1f} | "
        f"{last:.1f} | {ratio:.2f} | {times:.2f} |"
    )
    sources = ", ".join(f"{count / 1e6:.0f} MB from {kind}s" for kind, count in found.given.items())
    limited = "the processors, not the links: take a smaller --rate" if found.busy > BUSY else "the links"
    print(f"bytes the nodes had: {sources}")
    print(
        f"while they fetched together: {chosen.nodes * chosen.mb / last:.0f} MB/s in all, {os.cpu_count()} processors "
        f"{found.busy:.0%} busy, {found.ours:.0%} with this; what limits: {limited}"
    )
    missed = [name for name, bad in (("upload", times > UPLOAD_BAR), ("time", ratio > TIME_BAR)) if bad]
    outcome = f"missed {', '.join(missed)}" if missed else "met"
    print(f"bars: upload at most {UPLOAD_BAR}, time at most {TIME_BAR}: {outcome}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
