"""A whole trainer killed (-9) while it learns: how soon is the next step made, and does the curve go on?

    python tests/bench/bench_resume.py [--kills 3] [--steps 4]

The embedded run with its defaults and two nodes, real processes on loopback. After every STEPS steps all processes of
the trainer are killed in the same moment and `rltrainer serve` is started again; the nodes are left alone and come back
by themselves. Bar, for the median of the kills: the next step is in the ledger within 10 s after the learner said that
it goes on, which it does once its process has been started, and has imported its libraries and read policy, masters and
optimiser state; how long that took is printed. Checked besides: versions are without gap or repetition, no group is in
two batches and none of a step's is missing, no slot was accepted twice, the optimiser has made as many steps as there
are versions. The rewards of the steps around each kill are printed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

from tests.e2e.network import Network, Process, wait_until
from trainer.checkpoint import load_record

BAR_SECONDS = 10.0
STEP_SECONDS = 600  # for STEPS steps, on a machine that does other things too


def kill(trainer: Process) -> None:
    """All of its processes, before any can tell another."""
    parent = psutil.Process(trainer.pid)
    doomed = [parent, *parent.children(recursive=True)]
    for process in doomed:
        process.suspend()
    for process in doomed:
        process.kill()
    trainer.wait()
    psutil.wait_procs(doomed)


def resume(network: Network) -> tuple[Process, float, float, float]:
    """The new trainer, and seconds until its gateway listened, its learner had loaded, and its next step was made."""
    before, lines = network.versions(), _loaded(network)
    began = time.monotonic()
    trainer = network.serve()
    listens = time.monotonic() - began
    ready = 0.0
    while network.versions() == before:
        if not ready and _loaded(network) > lines:
            ready = time.monotonic() - began
        if time.monotonic() - began > STEP_SECONDS or trainer.poll() is not None:
            raise SystemExit(f"no step within {STEP_SECONDS} s of the start:\n{network.log('serve')}")
        time.sleep(0.05)
    made = time.monotonic() - began
    return trainer, listens, ready or made, made


def _loaded(network: Network) -> int:
    """How often a learner said that it goes on."""
    log = network.run.logs / "learner.log"
    return log.read_text().count("goes on from policy") if log.exists() else 0


def faults(network: Network) -> list[str]:
    """What is wrong with the record of the run."""
    found = []
    steps = network.ledger.steps()
    versions = [step.version for step in steps]
    if versions != list(range(1, len(versions) + 1)):
        found.append(f"versions are {versions}")
    view = network.ledger.view
    taken = {row["batch"]: row["n"] for row in view("SELECT batch, COUNT(*) AS n FROM groups GROUP BY batch")}
    found += [
        f"step {step.version} took {step.groups} and {step.flat_groups} groups, {taken.get(step.version, 0)} are marked"
        for step in steps
        if step.groups + step.flat_groups != taken.get(step.version, 0)
    ]
    twice = view(
        "SELECT group_id, slot FROM submissions WHERE state = 'ACCEPTED' GROUP BY group_id, slot HAVING COUNT(*) > 1"
    )
    if twice:
        found.append(f"{len(twice)} slots were accepted twice")
    newest = max(int(path.name.rpartition("-")[2]) for path in network.run.learner.glob("step-*[0-9]"))
    made = load_record(network.run, newest).optimiser_steps
    if made != newest:
        found.append(f"the optimiser made {made} steps for {newest} versions")
    blamed = sum(node["refused"] for node in network.nodes())
    return found + ([f"{blamed} traces of honest nodes were refused"] if blamed else [])


def rewards(network: Network, version: int, steps: int) -> str:
    rows = {step.version: step.reward_mean for step in network.ledger.steps()}
    before = [f"{rows[each]:.2f}" for each in range(max(1, version - steps + 1), version + 1)]
    after = [f"{rows[each]:.2f}" for each in range(version + 1, version + steps + 1) if each in rows]
    return f"{' '.join(before)} | {' '.join(after)}"


def cadence(network: Network) -> float:
    times = [step.created_ms / 1000 for step in network.ledger.steps()]
    return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="steps before each kill")
    options = parser.parse_args()
    beyond, killed_at = [], []
    with tempfile.TemporaryDirectory() as folder:
        network = Network(Path(folder))
        try:
            trainer = network.serve()
            for name in ("one", "two"):
                network.join(name)
            print(f"{'after policy':>12}{'listens':>10}{'loaded':>10}{'next step':>10}{'beyond it':>10}")
            for _ in range(options.kills):
                wanted = network.versions() + options.steps
                wait_until(lambda wanted=wanted: network.versions() >= wanted, STEP_SECONDS, f"{wanted} steps")
                usual = cadence(network)
                kill(trainer)
                killed_at.append(network.versions())
                trainer, listens, ready, made = resume(network)
                beyond.append(made - ready)
                print(
                    f"{killed_at[-1]:12}{listens:10.1f}{ready:10.1f}{made:10.1f}{beyond[-1]:10.1f}   "
                    f"(before the kill a step every {usual:.1f} s)", flush=True
                )  # fmt: skip
            wanted = network.versions() + options.steps
            wait_until(lambda: network.versions() >= wanted, STEP_SECONDS, f"{wanted} steps")
            kill(trainer)
            for version in killed_at:
                print(f"rewards around the kill after policy {version}: {rewards(network, version, options.steps)}")
            wrong = faults(network)
        finally:
            network.close()
    middle = statistics.median(beyond)
    print(f"next step {middle:.1f} s beyond loading, median of {len(beyond)} kills (bar {BAR_SECONDS:g})")
    print("the record of the run: " + ("; ".join(wrong) or "whole, nothing twice, nothing lost"))
    return 0 if middle <= BAR_SECONDS and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
