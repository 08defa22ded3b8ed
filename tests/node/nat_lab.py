"""A small internet in network namespaces: a public machine, and two homes, each behind a NAT of its own.

    public 10.99.0.1 ── bridge ──┬── router 10.99.0.11 (masquerade) ── home 192.168.1.2
                                 └── router 10.99.0.12 (masquerade) ── home 192.168.2.2

A router lets nothing in that nobody behind it asked for. Needs Linux, root, ip and nft; `why_not` says what is
missing. Not here: delay, loss, rates.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PUBLIC_ADDRESS = "10.99.0.1"
HOMES = (1, 2)


@dataclass(frozen=True)
class Lab:
    """Names of the namespaces."""

    prefix: str

    @property
    def public(self) -> str:
        return f"{self.prefix}-public"

    def router(self, number: int) -> str:
        return f"{self.prefix}-router{number}"

    def home(self, number: int) -> str:
        return f"{self.prefix}-home{number}"

    @property
    def all(self) -> tuple[str, ...]:
        return (*(self.home(n) for n in HOMES), *(self.router(n) for n in HOMES), self.public)


def why_not() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    missing = [tool for tool in ("ip", "nft", "sysctl") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    name = f"rlprobe{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "netns", "exec", name, "nft", "add", "table", "ip", "t")
        finally:
            _run("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()[:200]}"
    return ""


@contextmanager
def nat_lab(*, random_ports: bool) -> Iterator[Lab]:
    """The namespaces, removed at the end. `random_ports`: each connection leaves a router from a port at random."""
    lab = Lab(f"rl{os.getpid()}{'r' if random_ports else 'k'}")
    try:
        _make_public(lab)
        for number in HOMES:
            _make_home(lab, number, "fully-random" if random_ports else "")
        yield lab
    finally:
        for name in lab.all:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def within(namespace: str) -> list[str]:
    """What to put before a command so that it runs there."""
    return ["ip", "netns", "exec", namespace]


def _make_public(lab: Lab) -> None:
    _run("ip", "netns", "add", lab.public)
    _ip(lab.public, "link add br0 type bridge")
    for device in ("lo", "br0"):
        _ip(lab.public, f"link set {device} up")
    _ip(lab.public, f"addr add {PUBLIC_ADDRESS}/24 dev br0")


def _make_home(lab: Lab, number: int, option: str) -> None:
    router, home = lab.router(number), lab.home(number)
    for name in (router, home):
        _run("ip", "netns", "add", name)
    _run(*f"ip link add wan netns {router} type veth peer name port{number} netns {lab.public}".split())
    _run(*f"ip link add lan netns {router} type veth peer name eth0 netns {home}".split())
    _ip(lab.public, f"link set port{number} master br0")
    _ip(lab.public, f"link set port{number} up")
    _ip(router, f"addr add 10.99.0.1{number}/24 dev wan")
    _ip(router, f"addr add 192.168.{number}.1/24 dev lan")
    for device in ("lo", "wan", "lan"):
        _ip(router, f"link set {device} up")
    _ip(home, f"addr add 192.168.{number}.2/24 dev eth0")
    for device in ("lo", "eth0"):
        _ip(home, f"link set {device} up")
    _ip(home, f"route add default via 192.168.{number}.1")
    _run(*within(router), "sysctl", "-qw", "net.ipv4.ip_forward=1")
    rules = (
        "add table ip t",
        "add chain ip t post { type nat hook postrouting priority 100 ; }",
        f"add rule ip t post oifname wan masquerade {option}",
        "add chain ip t through { type filter hook forward priority 0 ; policy accept ; }",
        "add rule ip t through iifname wan ct state established,related accept",
        "add rule ip t through iifname wan drop",
        "add chain ip t to { type filter hook input priority 0 ; policy accept ; }",
        "add rule ip t to iifname wan ct state established,related accept",
        "add rule ip t to iifname wan drop",
    )
    for rule in rules:
        _run(*within(router), "nft", rule)


def _ip(namespace: str, arguments: str) -> None:
    _run("ip", "-n", namespace, *arguments.split())


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
