"""Runs async tests under trio and lends them two worlds, sockets and memory, and one victim process."""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

sys.path.insert(0, str(Path(__file__).parent))

from network_worlds import MemoryWorld, P2PWorld, Victim, World


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    world = arguments.get("world")
    trio.run(functools.partial(pyfuncitem.obj, **arguments), clock=world.clock() if world else None)
    return True


@pytest.fixture(params=[P2PWorld, MemoryWorld], ids=["p2p", "memory"])
def world(request: pytest.FixtureRequest) -> World:
    return request.param()


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    """A real host in a process of its own, under attack by a whole module's tests."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "network_victim.py")],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert process.stdout is not None
        yield Victim(process.pid, json.loads(process.stdout.readline())["address"])
        assert process.poll() is None, "an attack ended the victim"
    finally:
        process.kill()
        process.communicate()
