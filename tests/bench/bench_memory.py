"""Resident memory of every process over a long run (bar: slope under 1 % an hour after warm-up).

    python tests/bench/bench_memory.py [--minutes 30] [--warm-up 10]

One trainer and two nodes of the embedded run, at a learning rate so low that it stays the run it is. (One that learns
has learned its task after minutes; then most groups teach nothing, a version takes twenty times the traces, and what
the gateway knows of open epochs is as much more: --learning-rate 7e-4 shows that.) The slope is a least-squares line
through the samples after the warm-up, as a share of their mean; beside it the share that the last third's mean differs
from the first third's, which a single allocation does not fool. Long: not part of `make bench`'s quick round unless
--minutes is lowered.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from local_run import serving, start, stop  # first: it puts the repository on the path

from trainer.rundir import RunFolder

SAMPLE_SECONDS = 5


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
    print(f"{'process':40} {'MiB':>8} {'slope %/h':>10} {'thirds %':>9}")
    for who, series in sorted(samples.items()):
        kept = np.array([each for each in series if each[0] > options.warm_up * 60])
        if len(kept) < 12:
            print(f"{who:40} ended early")
            continue
        hours, size = kept[:, 0] / 3600, kept[:, 1] / 2**20
        slope = np.polyfit(hours, size, 1)[0] / size.mean() * 100
        third = len(size) // 3
        drift = (size[-third:].mean() / size[:third].mean() - 1) * 100
        print(f"{who:40} {size.mean():8.1f} {slope:10.2f} {drift:9.2f}")


def watch(samples: dict[str, list[tuple[float, int]]], pids: list[int], minutes: float) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < minutes * 60:
        for pid in pids:
            parent = psutil.Process(pid)
            for process in (parent, *parent.children(recursive=True)):
                try:
                    series = samples.setdefault(name_of(process), [])
                    series.append((time.monotonic() - begun, process.memory_info().rss))
                except psutil.NoSuchProcess:
                    continue
        time.sleep(SAMPLE_SECONDS)


if __name__ == "__main__":
    main()
