"""The page of a run: one HTML page, a JSON API and Prometheus metrics, as a process of its own.

It only reads the ledger, so a slow browser can stall neither the network nor the learner. No login: it listens on
loopback unless config says otherwise. Not here: what the figures mean (summary.py).
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final, TypeVar

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.staticfiles import StaticFiles
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from protocol.errors import UsageError
from protocol.outputs import cause
from trainer import rates, summary, waits
from trainer.child import CANNOT_START
from trainer.ledger import Ledger
from trainer.network import read_network
from trainer.rundir import Run, open_run
from trainer.telemetry import Telemetry

T = TypeVar("T")

_WEB = Path(__file__).parent / "web"
# Everything the page needs comes from this server; a node's id or an event's text can never become a script.
_CONTENT_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"


class State:
    """The ledger as the page reads it: one read-only connection, one reader at a time, cached for a moment so
    that many open browsers cost no more than one."""

    _FRESH_SECONDS = 0.5
    _RATES_SECONDS = 10.0

    def __init__(self, run: Run) -> None:
        self._ledger = Ledger(run.folder.ledger, read_only=True)
        self._config, self._folder = run.config, run.folder
        self._lock = threading.Lock()
        self._summary: dict[str, Any] = {}
        self._taken = -self._FRESH_SECONDS
        self._rates: dict[str, Any] = {}
        self._rates_taken = -self._RATES_SECONDS
        self._telemetry = Telemetry()
        self._caught_up = False
        threading.Thread(target=self._catch_up, args=(run,), name="telemetry", daemon=True).start()

    def _catch_up(self, run: Run) -> None:
        """What the run measured before this process: seconds for each 100,000 traces, which no request waits for."""
        with closing(Ledger(run.folder.ledger, read_only=True)) as ledger:
            self._telemetry.catch_up(ledger)
        self._caught_up = True

    def telemetry(self, view: Callable[[Telemetry], list[T]]) -> list[T]:
        """[] until it has caught up: counts that grow without anything happening would be taken for news."""
        if not self._caught_up:
            return []
        with self._lock:
            self._telemetry.catch_up(self._ledger)
            return view(self._telemetry)

    def summary(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() - self._taken >= self._FRESH_SECONDS:
                now = summary.summary(self._ledger, self._config, time.time_ns() // 1_000_000)
                self._summary = {**waits.of_processes(now, self._folder), **self._rates_lately()}
                self._taken = time.monotonic()
            return self._summary

    def _rates_lately(self) -> dict[str, Any]:
        """They read some thousand slots, and change with each group that is over."""
        if time.monotonic() - self._rates_taken >= self._RATES_SECONDS:
            self._rates = rates.told(self._ledger, self._config)
            self._rates_taken = time.monotonic()
        return self._rates

    def read(self, view: Callable[..., list[dict[str, Any]]], *arguments: Any) -> list[dict[str, Any]]:
        with self._lock:
            return view(self._ledger, *arguments)


def make_app(run: Run) -> FastAPI:
    """The application over one run folder."""
    state = State(run)
    app = FastAPI(title=f"rlcommons run {run.genesis.name}", docs_url=None, redoc_url=None)
    registry = CollectorRegistry()
    registry.register(_Metrics(state))

    @app.middleware("http")
    async def guard(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        response.headers["Content-Security-Policy"] = _CONTENT_POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    @app.get("/api/state")
    def get_state() -> dict[str, Any]:
        """The run now: version, reward, staleness, counts, nodes."""
        address = run.folder.address.read_text().strip() if run.folder.address.exists() else None
        told = {"name": run.genesis.name, "run": run.run.hex(), "address": address}
        return {**told, "network": read_network(run.folder), **state.summary()}

    @app.get("/api/steps")
    def get_steps(after: int = Query(-1, ge=-1)) -> list[dict[str, Any]]:
        """One row a learner step after version `after`."""
        return state.read(summary.history, after)

    @app.get("/api/stages")
    def get_stages() -> list[dict[str, Any]]:
        """Where the time of the newest rollouts went, a row a stage: mean and 95th percentile in seconds. What is
        `claimed` is the word of nodes, within what the trainer saw."""
        return state.telemetry(Telemetry.table)

    @app.get("/api/refusals")
    def get_refusals(most: int = Query(50, ge=1, le=500)) -> list[dict[str, Any]]:
        """The newest refused traces with their reasons."""
        return state.read(summary.refusals, most)

    @app.get("/api/events")
    def get_events(most: int = Query(50, ge=1, le=500)) -> list[dict[str, Any]]:
        """What happened, newest first."""
        return state.read(summary.events, most)

    @app.get("/metrics")
    def get_metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    app.mount("/", StaticFiles(directory=_WEB, html=True))
    return app


STEP_FIGURES: Final = {
    "kl": "KL from the policy that drew the batch to the one that learned from it, nats a token",
    "ess": "Effective sample size of the last batch, as a share of its tokens",
    "masked": "Share of the last batch's tokens left out for having moved too far",
    "clipped": "Share of the last batch's tokens whose ratio was clipped or capped",
    "entropy": "Entropy of the policy that learned, nats a token, estimated",
    "ratio_mean": "Mean ratio of the last batch's tokens, before any cap",
    "ratio_max": "Largest ratio of the last batch's tokens, before any cap",
    "gradient_norm": "Norm of the last gradient, before clipping",
    "learning_rate": "Learning rate of the last step",
    "seconds": "Duration of the last step",
}


class _Metrics:
    """Prometheus metrics, computed at each scrape."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        now = self._state.summary()
        gauges = {
            "policy_version": ("Latest published policy version", now["version"]),
            "reward_mean": ("Mean reward of the latest trained traces", now["reward_mean"]),
            "staleness_mean": ("Mean staleness of the latest trained traces, in versions", now["staleness_mean"]),
            "tokens_per_second": ("Tokens received, generated and observed", now["tokens_per_second"]),
            "traces_per_second": ("Traces received", now["traces_per_second"]),
            "audits_waiting": ("Traces waiting for their audit", now["audits_waiting"]),
            "nodes_connected": ("Nodes with a session", sum(node["connected"] for node in now["nodes"])),
        }
        if evaluation := now["evaluation"]:
            gauges["held_out_reward"] = ("Mean reward of the newest evaluation", evaluation["reward_mean"])
        for name, text in STEP_FIGURES.items():
            gauges[f"step_{name}"] = (text, (now["last_step"] or {}).get(name))
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(f"rlcommons_{name}", text, value=value)
        yield from _judged(now)
        yield from _rates(now)
        groups = GaugeMetricFamily("rlcommons_groups", "Groups by state", labels=["state"])
        for name, count in now["groups"].items():
            groups.add_metric([name], count)
        yield groups
        yield from self._state.telemetry(lambda telemetry: [telemetry.family()])


def _judged(now: dict[str, Any]) -> Iterator[Metric]:
    """Verdicts ever given, and traces as they stand."""
    text = "Verdicts given; a trace that is judged again gets one more (traces as they stand: rlcommons_traces)"
    verdicts = CounterMetricFamily("rlcommons_verdicts", text, labels=["outcome", "reason"])
    given = {("ACCEPTED", ""): 0, ("NOT_JUDGED", ""): 0}
    for row in now["verdicts"]:
        reason = (row["reason"] or "") if row["outcome"] == "REFUSED" else ""
        given[row["outcome"], reason] = given.get((row["outcome"], reason), 0) + row["n"]
    for labels, count in given.items():
        verdicts.add_metric(labels, count)
    yield verdicts
    traces = GaugeMetricFamily("rlcommons_traces", "Traces with a receipt by their state now", labels=["state"])
    for state, count in now["traces"].items():
        traces.add_metric([state], count)
    yield traces


ENDS: Final = ("expired", "returned", "refused", "unanswered", "stale", "given_up", "used")


def _rates(now: dict[str, Any]) -> Iterator[Metric]:
    """What became of the last slots leased (rates.py). Each is counted once in each `by`."""
    leases = GaugeMetricFamily(
        "rlcommons_leased_slots", "How the last slots leased ended", labels=["by", "kind", "end"]
    )  # fmt: skip
    lag = GaugeMetricFamily(
        "rlcommons_lag_versions", "Mean versions between who drew the used ones and who learned", labels=["by", "kind"]
    )
    for each in now["rates"]:
        for end in ENDS:
            leases.add_metric([each["by"], each["kind"], end], each[end])
        if each["lag_mean"] is not None:
            lag.add_metric([each["by"], each["kind"]], each["lag_mean"])
    yield leases
    yield lag
    text = "Kinds of traces of which clearly fewer are learned from than of others"
    yield GaugeMetricFamily("rlcommons_losses", text, value=len(now["losses"]))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises UsageError naming the address when it is taken."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        # Python adds the address to the words of whoever refused it, which need not be the system.
        why = cause(error).partition(" (while attempting")[0]
        raise UsageError(
            f"the page cannot listen on {host}:{port}: {why}: set page_host and page_port in config.toml"
        ) from None


def main(arguments: list[str]) -> int:
    """`python -m trainer.api RUN`: serve until standard input ends. CANNOT_START where it cannot listen."""
    try:
        run = open_run(Path(arguments[0]))
        listener = bind(run.config.page_host, run.config.page_port)
    except UsageError as error:
        print(error, file=sys.stderr)
        return CANNOT_START
    run.folder.page.write_text(f"http://{run.config.page_host}:{listener.getsockname()[1]}/\n")
    server = uvicorn.Server(uvicorn.Config(make_app(run), log_level="warning", lifespan="off"))

    def stop_when_orphaned() -> None:
        sys.stdin.buffer.read()  # returns when the supervisor's end of the pipe closes
        server.should_exit = True

    threading.Thread(target=stop_when_orphaned, daemon=True).start()
    server.run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
