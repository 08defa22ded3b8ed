"""rltrainer: make a run, serve it to nodes, look at it, export traces."""

from __future__ import annotations

import protocol.interrupts  # noqa: F401 - first: from here on Ctrl-C ends this without a traceback

# isort: split
import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol.arguments import Parser, add_version, not_empty

_EPILOG = """exit codes:
  0    done; doctor: nothing has to be done
  1    doctor: something has to be done before the run can go on
  2    wrong arguments or settings, a folder that is not a run, a place that cannot be written to
  3    this machine failed (a full disk, memory, a process that would not start)
  4    serve: the run stalled, and starting the part that hung again did not help
  5    serve: the learner found no finite loss or gradient three times in a row: the policy is kept, look at it
  6    plan: not enough is measured yet; it says what is missing
  130  interrupted by Ctrl-C: everything is on disk, `rltrainer serve` goes on from there
  141  whoever read the output went away (`| head`)
"""

_PLAN_EPILOG = """Of means over the last ten minutes or 32 steps, whichever is longer, served or not. The part that
holds the others up is marked; where it is another than a quarter of that time ago, that is said. What happens at nodes
is by their own figures, within what the trainer saw of it.

--json:
  missing     what is not measured yet, a text each; then all else is null, and the exit code is 6
  measured    means: *_seconds a trace (held, slot_wait, rollout, decoding, verified, audit) or a step (step_seconds),
              shares from 0 to 1 (decoding, audited, learned), step_traces, traces_per_second, nodes, slots, auditors
  parts       rollouts_in_flight, nodes, auditors, learner: have, wanted (null: one is all there is),
              most_traces_per_second (null: it bounds none), busy (share of the time, or of what is wanted)
  bottleneck  "rollouts in flight", "nodes", "auditors" or "learner"; "device" where they take turns on one
  device      null, or of a run that is served with --placement colocated the share of the time of each that had it:
              home_engine, learner, nobody. There parts are auditors and learner alone: it needs no nodes
  moved       null, or before, now (parts), before_stage, now_stage (of `rltrainer timeline`) and changed:
              {name of a mean: [before, now]}
"""


_TIMELINE_EPILOG = """stages:
  queue wait, prefill, decode, tool wait, hand in   at its node, by the node's own figures, which nobody checked: the
                                                    trainer saw itself how long they took together, and they are cut
                                                    down to that. Hand in is what they leave of it: proofs, the
                                                    node's disk, the network both ways
  verify        from the receipt to the verdict that stands, which is the newest where an audit followed later
  batch wait    from there until the step that took it began
  train         that step

FILE is in the trace event format (JSON): open it at https://ui.perfetto.dev, where it stays on this machine, or at
chrome://tracing. Each node is a process in it, with as many lines as it had rollouts at once; so is the trainer.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    options = _parser().parse_args(_named_one_by_one(sys.argv[1:] if arguments is None else arguments))
    from protocol.command import carry_out
    from protocol.errors import PolicyError, RLCommonsError, UsageError
    from protocol.outputs import printable

    def failed(error: RLCommonsError) -> int:
        print(f"rltrainer: {printable(str(error))}", file=sys.stderr)
        return 2 if isinstance(error, UsageError | PolicyError) else 3

    return carry_out("rltrainer", lambda: options.command(options), failed)


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="rltrainer",
        description="Reinforcement learning on rollouts from nodes you need not trust.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    init = commands.add_parser("init", help="make a run: key, genesis, settings and first policy")
    init.add_argument("run", type=Path, help="folder to make")
    init.add_argument(
        "--policy", type=not_empty, default="embedded",
        help="a model folder, hub:ORG/NAME, or 'embedded' (default: a 0.1M demo policy)",
    )  # fmt: skip
    init.add_argument("--name", default="", help="name of the run (default: the folder's)")
    init.add_argument(
        "--environment", action="append", default=[], metavar="NAME[:PARAMETERS][=WEIGHT]",
        help="task to train on, may be given several times (default tools8@1)",
    )  # fmt: skip
    init.add_argument("--preset", choices=("none", "embedded", "smollm2"), help="settings that suit a shipped policy")
    init.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings",
        help="a setting of trainer/config.py, e.g. --set learning_rate=1e-6; kept in RUN/config.toml",
    )  # fmt: skip
    init.set_defaults(command=_init)

    serve = commands.add_parser("serve", help="serve the run to nodes, verify, learn and publish")
    serve.add_argument("run", type=Path)
    serve.add_argument("--json", action="store_true", help="one JSON object a line instead of the live view")
    serve.add_argument(
        "--moved", action="store_true", help="this folder is a copy, and the run is served nowhere else any more"
    )
    serve.add_argument(
        "--wandb", default="", metavar="PROJECT", help="also send each step to this project of Weights & Biases"
    )
    serve.add_argument(
        "--placement", choices=("disaggregated", "colocated", "both"),
        help="who generates: nodes, this machine's own engine in turns with the learner, or both (default: the run's)",
    )  # fmt: skip
    serve.add_argument(
        "--trust", action="extend", type=_names, default=[], metavar="PEER_ID[,PEER_ID]",
        help="audit these nodes at audit_floor from the first trace, until one lies; 'self' is the home engine; "
        "may be repeated",
    )  # fmt: skip
    serve.set_defaults(command=_serve)

    status = commands.add_parser("status", help="show the state of a run, served or not")
    status.add_argument("run", type=Path)
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(command=_status)

    plan = commands.add_parser(
        "plan",
        help="how many rollouts in flight, nodes and auditors keep decoding and the learner busy, as measured",
        epilog=_PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument("run", type=Path)
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    plan.set_defaults(command=_plan)

    timeline = commands.add_parser(
        "timeline",
        help="where the time of a rollout went, stage by stage; or of the last ones, as a file for ui.perfetto.dev",
        epilog=_TIMELINE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    timeline.add_argument("run", type=Path)
    which = timeline.add_mutually_exclusive_group()
    which.add_argument("--digest", help="first hex digits of the trace's digest (default: the newest learned from)")
    which.add_argument("--last", type=_count, metavar="N", help="the last N that were learned from, at most 10,000")
    timeline.add_argument("-o", "--out", type=Path, metavar="FILE", help="write it for ui.perfetto.dev, too")
    timeline.add_argument("--json", action="store_true", help="print one JSON object a rollout")
    timeline.set_defaults(command=_timeline)

    doctor = commands.add_parser("doctor", help="what is wrong with a run folder, and what to do; changes nothing")
    doctor.add_argument("run", type=Path)
    doctor.add_argument("--json", action="store_true", help="print one JSON object a finding")
    doctor.set_defaults(command=_doctor)

    backup = commands.add_parser("backup", help="copy a run, served or not, to a folder that can be restored")
    backup.add_argument("run", type=Path)
    backup.add_argument("out", type=Path, metavar="DIR", help="folder to make, or a back-up of this run to replace")
    backup.add_argument("--json", action="store_true", help="print one JSON object")
    backup.set_defaults(command=_backup)

    restore = commands.add_parser("restore", help="make a run of a back-up, to serve in place of the one that is gone")
    restore.add_argument("source", type=Path, metavar="DIR", help="the back-up, or a copied folder that nobody serves")
    restore.add_argument("run", type=Path, help="folder to make")
    lost = restore.add_mutually_exclusive_group(required=True)
    lost.add_argument(
        "--published", type=_version, metavar="VERSION",
        help="the highest policy version that anybody was given: its number and those below are not used again",
    )  # fmt: skip
    lost.add_argument("--nothing-lost", action="store_true", help="the run was not served since the copy was made")
    restore.add_argument("--json", action="store_true", help="print one JSON object")
    restore.set_defaults(command=_restore)

    export = commands.add_parser("export-trace", help="write one trace as a file for `rlverify check`")
    export.add_argument("run", type=Path)
    export.add_argument("-o", "--out", type=Path, default=Path("trace.msgpack"), help="default trace.msgpack")
    export.add_argument("--digest", help="first hex digits of the trace's digest (default: the newest)")
    export.add_argument("--refused", action="store_true", help="the newest refused trace instead of an accepted one")
    export.add_argument("--verdict", type=Path, metavar="FILE", help="write its verdict alone, too")
    export.add_argument(
        "--calibration", type=Path, metavar="FILE", help="write the calibration of its verdict alone, too"
    )
    export.add_argument("--json", action="store_true", help="print one JSON object")
    export.set_defaults(command=_export)

    policy = commands.add_parser(
        "export", help="copy a policy of the run as a folder that transformers' from_pretrained and vLLM load"
    )
    policy.add_argument("run", type=Path)
    policy.add_argument("out", type=Path, metavar="DIR", help="folder to make")
    policy.add_argument("--version", type=_version, metavar="N", help="default: the latest")
    policy.add_argument("--json", action="store_true", help="print one JSON object")
    policy.set_defaults(command=_export_policy)

    log = commands.add_parser(
        "export-log", help="write the run's log for `rlverify audit`: epochs, traces, policies, as files to serve"
    )
    log.add_argument("run", type=Path)
    log.add_argument("out", type=Path, help="folder to write; what is there of this run's log is brought up to date")
    log.add_argument("--traces", action=argparse.BooleanOptionalAction, default=True, help="with the traces kept")
    log.add_argument("--policies", action=argparse.BooleanOptionalAction, default=True, help="with the policies kept")
    log.add_argument("--json", action="store_true", help="print one JSON object")
    log.set_defaults(command=_export_log)

    publish = commands.add_parser(
        "publish", help="write the published policies as static files, for nodes that join with --mirror URL"
    )
    publish.add_argument("run", type=Path)
    publish.add_argument(
        "--mirror", type=Path, required=True, metavar="DIR", help="folder to write, or to bring up to date"
    )
    publish.add_argument("--json", action="store_true", help="print one JSON object")
    publish.set_defaults(command=_publish)

    quarantine = commands.add_parser("quarantine", help="list the traces that auditors died on")
    quarantine.add_argument("run", type=Path)
    quarantine.add_argument("--json", action="store_true", help="print one JSON object a trace")
    quarantine.set_defaults(command=_quarantine)
    return parser


def _named_one_by_one(words: Sequence[str]) -> list[str]:
    """`--trust A B` as `--trust A --trust B`: an option that takes all the words behind it would take RUN, too."""
    told: list[str] = []
    naming = False
    for word in words:
        if naming and _is_name(word) and told[-1] != "--trust":
            told.append("--trust")
        elif told[-1:] != ["--trust"]:
            naming = word.startswith("--trust")
        told.append(word)
    return told


def _is_name(word: str) -> bool:
    """Whether it can only be meant as a node: also a mistyped one, which is then told as such."""
    return word == "self" or word.startswith("12D3KooW")


def _names(text: str) -> list[str]:
    return text.replace(",", " ").split() or [text]


def _init(options: argparse.Namespace) -> int:
    from protocol import identity
    from trainer.config import config_from
    from trainer.init import init_run
    from trainer.presets import PRESETS

    preset = options.preset or ("embedded" if options.policy == "embedded" else "none")
    table = {**PRESETS[preset], **dict(_setting(text) for text in options.settings)}
    run = init_run(
        options.run,
        name=options.name or options.run.resolve().name,
        policy=options.policy,
        environments=tuple(_environment(text) for text in options.environment or ["tools8@1"]),
        config=config_from(table, "--set"),
    )
    print(f"run      {options.run}  ({run.run.hex()[:16]}…)")
    print(f"trainer  {identity.peer_id(run.genesis.trainer)}")
    print(f"policy   version 0, root {run.genesis.first_policy_root.hex()[:16]}…")
    print(f"settings {run.folder.config}")
    print(f"next     rltrainer serve {options.run}")
    return 0


def _setting(text: str) -> tuple[str, Any]:
    from protocol.errors import UsageError

    name, mark, value = text.partition("=")
    if not mark:
        raise UsageError(f"--set {text}: write FIELD=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _environment(text: str) -> Any:
    """NAME[:PARAMETERS][=WEIGHT]; a name itself may hold a colon before its @version."""
    from protocol.environments.base import load
    from protocol.errors import UsageError
    from protocol.run import EnvironmentShare

    body, mark, weight = text.rpartition("=")
    if not mark:
        body, weight = text, "1"
    if not weight.isdecimal() or not 0 < int(weight) <= 1_000_000:
        raise UsageError(f"--environment {text}: the weight must be a whole number from 1 to 1000000")
    head, at, tail = body.partition("@")
    version, _, parameters = tail.partition(":")
    name = head + at + version
    load(name, parameters)
    return EnvironmentShare(name, parameters, int(weight))


def _serve(options: argparse.Namespace) -> int:
    from trainer.serve import serve

    code: int = serve(
        options.run,
        as_json=options.json,
        moved=options.moved,
        wandb=options.wandb,
        placement=options.placement,
        trust=options.trust,
    )
    return code


def _plan(options: argparse.Namespace) -> int:
    from protocol.device_turns import turns
    from trainer import planning
    from trainer.ledger import Ledger
    from trainer.measured import measured
    from trainer.rundir import open_run

    run = open_run(options.run)
    stretch = measured(Ledger(run.folder.ledger, read_only=True), run.config)
    if lacking := planning.missing(stretch):
        if options.json:
            rest = dict.fromkeys(("measured", "parts", "bottleneck", "device", "moved"))
            print(json.dumps({"missing": lacking, **rest}))
        else:
            print("not enough is measured yet for a plan:")
            print(*(f"  {each}" for each in lacking), sep="\n")
        return 6
    means = planning.means(stretch)
    found = (means, planning.plan(means), planning.moved(stretch))
    if run.folder.turns.is_dir():
        found = (means, planning.in_turns(found[1], means, turns(run.folder.turns), stretch.traces[0].at_ms), None)
    if options.json:
        print(json.dumps(planning.as_object(*found)))
    else:
        print(*planning.as_table(*found), sep="\n")
    return 0


def _timeline(options: argparse.Namespace) -> int:
    from trainer import chain, timeline
    from trainer.ledger import Ledger
    from trainer.rundir import open_run, require_spare

    folder = open_run(options.run).folder
    ledger = Ledger(folder.ledger, read_only=True)
    found = timeline.choose(ledger, digest=options.digest, last=options.last)
    if options.out is not None:
        require_spare(folder, options.out)
        timeline.write_events(options.out, found)
    if options.json:
        for each in found:
            print(json.dumps(timeline.as_object(each)))
        return 0
    if options.last is None:
        print(*timeline.waterfall(found[0], chain.complete_ms(ledger, found[0])), sep="\n")
    else:
        print(*timeline.table(found), sep="\n")
    if options.out is not None:
        many = f"{len(found):,} rollout{'s' if len(found) > 1 else ''}"
        print(f"\n{options.out}: {many}; open it at https://ui.perfetto.dev or chrome://tracing")
    return 0


def _count(text: str) -> int:
    from trainer.timeline import MOST

    if not text.isascii() or not text.isdecimal() or not 0 < int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rollouts: give one from 1 to {MOST:,}")
    return int(text)


def _doctor(options: argparse.Namespace) -> int:
    from trainer.doctor import examine

    code = 0
    for finding in examine(options.run, time.time_ns() // 1_000_000):
        print(finding.json() if options.json else finding.line(), flush=True)
        code = max(code, int(finding.needs_action))
    return code


def _version(text: str) -> int:
    from trainer.audit_draw import LAST_VERSION

    if not text.isascii() or not text.isdecimal() or len(text) > 20 or int(text) > LAST_VERSION:
        raise argparse.ArgumentTypeError(f"{text!r} is no version: give a whole number, {LAST_VERSION:,} at most")
    return int(text)


def _backup(options: argparse.Namespace) -> int:
    import dataclasses

    from trainer.backup import back_up
    from trainer.rundir import open_run

    made = back_up(open_run(options.run), options.out, time.time_ns() // 1_000_000)
    if options.json:
        print(json.dumps({"folder": str(options.out), **dataclasses.asdict(made)}))
        return 0
    print(f"{options.out}: policy {made.version} of run {made.run[:16]}…, {made.bytes / 1e6:,.1f} MB")
    print("it holds the run's key: keep it as safe as the run")
    print(f"a run again: rltrainer restore {options.out} RUN --published VERSION")
    return 0


def _restore(options: argparse.Namespace) -> int:
    from trainer.backup import restore

    now_ms = time.time_ns() // 1_000_000
    done = restore(options.source, options.run, published=options.published, now_ms=now_ms)
    if options.json:
        found = {"folder": str(options.run), "version": done.version, "passed_over": done.passed_over}
        print(json.dumps(found))
        return 0
    print(f"{options.run}: goes on from policy {done.version}")
    if done.passed_over:
        print(f"{done.passed_over} policies are lost; their numbers, and those of receipts and verdicts, stay unused")
    print(f"next     rltrainer serve {options.run}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from trainer.ledger import Ledger
    from trainer.network import read_network
    from trainer.rates import told
    from trainer.rundir import open_run
    from trainer.summary import summary
    from trainer.waits import as_it_stands

    run = open_run(options.run)
    ledger = Ledger(run.folder.ledger, read_only=True)
    now = summary(ledger, run.config, time.time_ns() // 1_000_000)
    found = {**as_it_stands(now, run.folder), **told(ledger, run.config)}
    if options.json:
        print(json.dumps({**found, "network": read_network(run.folder)}))
        return 0
    from rich.console import Console

    from trainer.view import notes, render

    console = Console()
    console.print(render(run, found))
    for line in notes(run, found):
        console.print(line, soft_wrap=True)
    return 0


def _export(options: argparse.Namespace) -> int:
    from trainer.export import export_trace
    from trainer.ledger import Ledger
    from trainer.ledger_rows import SubmissionState
    from trainer.rundir import open_run

    run = open_run(options.run)
    ledger = Ledger(run.folder.ledger, read_only=True)
    state = SubmissionState.REFUSED if options.refused else SubmissionState.ACCEPTED
    alone = {"verdict": options.verdict, "calibration": options.calibration}
    beside = {name: path for name, path in alone.items() if path is not None}
    chosen = export_trace(run, ledger, options.out, digest=options.digest, state=state, **beside)
    policy = run.folder.policy(chosen.policy_version)
    if options.json:
        files = {"file": str(options.out), **{name: str(path) for name, path in beside.items()}}
        print(json.dumps({**files, "trace": chosen.digest.hex(), "policy": str(policy)}))
        return 0
    print(f"{options.out}: trace {chosen.digest.hex()[:16]}…, policy version {chosen.policy_version}")
    for name, path in beside.items():
        print(f"{path}: its {name} alone")
    if policy.exists():
        given = "".join(f" --{name} {path}" for name, path in beside.items())
        print(f"check it: rlverify check {options.out} --policy {policy}{given}")
    else:
        print(f"its policy is no longer kept (keep_policies = {run.config.keep_policies}): check it with a copy")
    return 0


def _export_policy(options: argparse.Namespace) -> int:
    from trainer.export import export_policy
    from trainer.ledger import Ledger
    from trainer.rundir import open_run

    run = open_run(options.run)
    version, root = export_policy(run, Ledger(run.folder.ledger, read_only=True), options.out, options.version)
    if options.json:
        print(json.dumps({"folder": str(options.out), "version": version, "root": root.hex()}))
        return 0
    print(f"{options.out}: policy version {version}, root {root.hex()[:16]}…")
    return 0


def _export_log(options: argparse.Namespace) -> int:
    from trainer.export_log import export_log
    from trainer.ledger import Ledger
    from trainer.rundir import open_run

    run = open_run(options.run)
    ledger = Ledger(run.folder.ledger, read_only=True)
    done = export_log(run, ledger, options.out, traces=options.traces, policies=options.policies)
    if options.json:
        counts = {name: getattr(done, name) for name in ("epochs", "sealed", "traces", "policies")}
        print(json.dumps({"folder": str(options.out), **counts}))
        return 0
    print(f"{options.out}: {done.epochs} epochs, {done.sealed} of them closed and sealed")
    print(f"written now: {done.traces} traces, {done.policies} policies")
    print(f"check it: rlverify audit {options.out}")
    return 0


def _publish(options: argparse.Namespace) -> int:
    import dataclasses

    from trainer.ledger import Ledger
    from trainer.mirror import write_mirror
    from trainer.rundir import open_run

    run = open_run(options.run)
    done = write_mirror(run, Ledger(run.folder.ledger, read_only=True), options.mirror)
    if options.json:
        print(json.dumps({"folder": str(options.mirror), **dataclasses.asdict(done)}))
        return 0
    print(f"{options.mirror}: {done.versions} policies, the newest is {done.latest}")
    print(f"written now: {done.written} pieces, removed {done.removed}")
    print("serve the folder with any web server; nodes join with --mirror URL")
    return 0


def _quarantine(options: argparse.Namespace) -> int:
    from protocol.outputs import printable
    from trainer.ledger import Ledger
    from trainer.quarantine import in_quarantine
    from trainer.rundir import open_run

    run = open_run(options.run)
    found = in_quarantine(run, Ledger(run.folder.ledger, read_only=True))
    if options.json:
        for each in found:
            fields = {"file": str(each.file), "trace": each.digest, "node": each.node, "cause": each.cause}
            print(json.dumps({**fields, "received_ms": each.received_ms, "policy_version": each.policy_version}))
        return 0
    for each in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.received_ms / 1000))
        print(f"{when}  {each.file}\n  from {each.node}\n  {printable(each.cause)}")
        print(f"  look: rlverify check {each.file} --policy {run.folder.policy(each.policy_version)}")
    if found:
        print("Nobody was blamed. Looking may hang or take all memory, as it did here: do it where that does no harm.")
    else:
        print("nothing is in quarantine")
    return 0


if __name__ == "__main__":
    sys.exit(main())
