"""Resident memory of every process over a long run (bar: slope under 1 % an hour after warm-up).

    python tests/bench/bench_memory.py [--minutes 30] [--warm-up 10]

One trainer and two nodes of the embedded run, at a learning rate so low that it stays the run it is. (One that learns
has learned its task after minutes; then most groups teach nothing, a version takes twenty times the traces, and what
the gateway knows of open epochs is as much more: --learning-rate 7e-4 shows that.) Of each minute the most and the
least is taken: what the process needed, and what it kept. (A mean would be of how many looks fell into a step, which
changes with whatever else the machine does.) A slope is a least-squares line through the minutes after the warm-up, as
a share of their mean; beside it how much the last third's mean differs from the first third's, which a single
allocation does not fool. Long: not part of `make bench`'s quick round unless --minutes is lowered.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from local_run import serving, start, stop  # first: it puts the repository on the path

from trainer.rundir import RunFolder

SAMPLE_SECONDS = 0.2
LOOK_SECONDS = 5  # for new processes, which takes longer


def name_of(process: psutil.Process) -> str:
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words else words[0]
    return f"{module} {process.pid}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--warm-up", type=float, default=10, dest="warm_up")
    parser.add_argument("--learning-rate", type=float, default=1e-6, dest="learning_rate")
    options = parser.parse_args()
    samples: dict[str, list[tuple[float, int]]] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        serving(folder := Path(name), learning_rate=options.learning_rate) as (trainer, address),
    ):
        nodes = [
            start(folder / f"node{i}.log", "node.cli", "join", address, "--cpu", "--home", folder / f"node{i}")
            for i in (1, 2)
        ]
        try:
            watch(samples, [trainer.pid, *(node.pid for node in nodes)], options.minutes)
        finally:
            for node in nodes:
                stop(node)
            versions = max(RunFolder(folder / "run").versions())
    print(f"{versions} policy versions in {options.minutes:g} minutes")
    print(f"{'process':32} {'MiB most':>9} {'slope %/h':>10} {'thirds %':>9} {'least':>9} {'%/h':>7} {'thirds %':>9}")
    for who, series in sorted(samples.items()):
        minutes: dict[int, list[int]] = {}
        for seconds, size in series:
            if seconds > options.warm_up * 60:
                minutes.setdefault(int(seconds // 60), []).append(size)
        if len(minutes) < 6:
            print(f"{who:32} ended early")
            continue
        most = course([max(sizes) / 2**20 for sizes in minutes.values()])
        least = course([min(sizes) / 2**20 for sizes in minutes.values()])
        print(f"{who:32} {most[0]:9.1f} {most[1]:10.2f} {most[2]:9.2f} {least[0]:9.1f} {least[1]:7.2f} {least[2]:9.2f}")


def course(sizes: list[float]) -> tuple[float, float, float]:
    """Mean of a figure of each minute, its slope in % of that an hour, and the last third against the first in %."""
    size = np.array(sizes)
    third = len(size) // 3
    slope = np.polyfit(np.arange(len(size)) / 60, size, 1)[0] / size.mean() * 100
    return size.mean(), slope, (size[-third:].mean() / size[:third].mean() - 1) * 100


def watch(samples: dict[str, list[tuple[float, int]]], pids: list[int], minutes: float) -> None:
    begun = looked = time.monotonic()
    known: list[tuple[str, psutil.Process]] = []
    while (now := time.monotonic()) - begun < minutes * 60:
        if not known or now - looked > LOOK_SECONDS:
            known, looked = processes(pids), now
        for name, process in known:
            with contextlib.suppress(psutil.NoSuchProcess):
                samples.setdefault(name, []).append((now - begun, process.memory_info().rss))
        time.sleep(SAMPLE_SECONDS)


def processes(pids: list[int]) -> list[tuple[str, psutil.Process]]:
    """These and those they started, with names."""
    found = []
    for pid in pids:
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((name_of(process), process))
    return found


if __name__ == "__main__":
    main()
