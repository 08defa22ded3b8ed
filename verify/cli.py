"""rlverify: audit a trace offline, trusting neither the node nor the trainer (SPEC 14)."""

from __future__ import annotations

import protocol.interrupts  # noqa: F401 - first: from here on Ctrl-C ends this without a traceback

# isort: split
import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from protocol.arguments import Parser, add_version, not_empty
from protocol.limits import MAX_LOG_ITEMS, MAX_TRACE_TOKENS

_MOST_TRACES: Final = 10_000  # drawn here: hours of work

_ENDINGS = "  130, 141  interrupted by Ctrl-C, or whoever read the output went away (`| head`): nothing is implied\n"

_EPILOG = f"""exit codes:
  0  accepted: every check passed
  1  refused: a check failed; its reason, value and limit are printed
  2  unusable input: no verdict (not a trace file, another policy's folder, wrong arguments)
  3  not judged: this machine failed (out of memory, an environment that raised)
{_ENDINGS}"""

_INSPECT_EPILOG = f"""exit codes:
  0  shown, whatever is wrong with the trace: nothing is judged
  2  unusable input: not a trace file, another policy's folder, wrong arguments
  3  this machine failed
{_ENDINGS}"""

_AUDIT_EPILOG = f"""exit codes:
  0  all agree: everything that could be checked holds; what could not be checked is said
  1  something disagrees; each is printed with where it is
  2  unusable: not the log of a run, an address that does not answer, wrong arguments
  3  this machine failed
{_ENDINGS}"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    options = _parser().parse_args(arguments)
    from protocol.command import carry_out
    from protocol.errors import LocalError, PolicyError, RLCommonsError

    def failed(error: RLCommonsError) -> int:
        ours = isinstance(error, LocalError) and not isinstance(error, PolicyError)
        return _fail(error, 3 if ours else 2)

    return carry_out("rlverify", lambda: options.command(options), failed)


def _fail(error: Exception, code: int) -> int:
    from protocol.outputs import printable

    print(f"rlverify: {printable(str(error))}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="rlverify",
        description="Check a trace file: signatures, lease, replay of the task, seeded sampling, proofs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="recompute the verdict of a trace",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("trace", type=Path, help="file written by `rltrainer export-trace`")
    check.add_argument("--policy", type=Path, required=True, help="folder of the policy version it was drawn from")
    check.add_argument("--no-model", action="store_true", help="run only the checks that need no model")
    check.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    check.add_argument(
        "--calibration", type=Path, help="judge by this calibration (`rlverify calibrate`) instead of the file's"
    )
    check.add_argument("--verdict", type=Path, help="compare with this verdict instead of the file's")
    check.add_argument("--json", action="store_true", help="print one JSON object (SPEC 14)")
    check.set_defaults(command=_check)
    _add_calibrate(commands)
    inspect = commands.add_parser(
        "inspect",
        help="show a trace as a person would want to read it",
        epilog=_INSPECT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    inspect.add_argument("trace", type=Path, help="file written by `rltrainer export-trace`")
    inspect.add_argument("--policy", type=Path, help="its policy folder: shows text beside token ids")
    inspect.add_argument("--recompute", action="store_true", help="run the policy: shows margins and proofs")
    inspect.add_argument("--device", default="cpu", help="where to recompute: cpu, cuda or cuda:N (default cpu)")
    inspect.add_argument("--all", action="store_true", help="every turn, token and proof, however many there are")
    inspect.add_argument("--json", action="store_true", help="print one JSON object, with all there is (SPEC 14)")
    inspect.set_defaults(command=_inspect)
    _add_audit(commands)
    _add_controls(commands)
    _add_policy(commands)
    return parser


_POLICY_EPILOG = f"""exit codes:
  0  the folder is the policy that the manifest names
  1  it is not, or the manifest has expired or is not that trainer's; what differs is printed
  2  unusable: not a manifest file, a folder that is no policy, wrong arguments
  3  this machine failed
{_ENDINGS}"""


def _add_policy(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    policy = commands.add_parser(
        "policy",
        help="hold a policy folder against a signed manifest",
        epilog=_POLICY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    policy.add_argument("folder", type=Path, help="the policy: a Hugging Face model folder")
    policy.add_argument("--manifest", type=Path, required=True, help="manifests/NNNNNN.msgpack of a mirror")
    policy.add_argument("--trainer", metavar="PEER_ID", help="whose it must be (in the run's address after /p2p/)")
    policy.add_argument("--json", action="store_true", help="print one JSON object (SPEC 14)")
    policy.set_defaults(command=_policy)


def _policy(options: argparse.Namespace) -> int:
    from protocol.identity import node_from_peer_id
    from verify.policy_check import as_json, as_text, check_policy, read_manifest

    trainer = None if options.trainer is None else node_from_peer_id(options.trainer)
    signed = read_manifest(options.manifest)
    report = check_policy(options.folder, signed, trainer=trainer, now_ms=time.time_ns() // 1_000_000)
    print(json.dumps(as_json(report)) if options.json else as_text(report))
    return 0 if report.passed else 1


_CONTROLS_EPILOG = f"""exit codes:
  0  every control that has to be caught was caught in time, and no honest trace was refused
  1  a bar was missed (its row says which), or a pair was too noisy to be calibrated
  2  unusable input: no policy, an unknown environment, dtype or control, a page that cannot be written there
  3  this machine failed (out of memory, a full disk, an environment that raised)
{_ENDINGS}"""


def _add_controls(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    controls = commands.add_parser(
        "controls",
        help="run every known cheat against a policy, and show which are caught and by what",
        epilog=_CONTROLS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = controls.add_argument
    add("--policy", type=Path, required=True, help="folder of the policy")
    add("--dtype", default="float32", help="in which the node computes: float32 (default) or bfloat16")
    add("--verifier-dtype", action="append", help="in which the auditor recomputes (default: the node's); repeatable")
    add("--traces", type=_within(1, _MOST_TRACES), default=32, help="traces an attack begins from (default 32)")
    add("--honest", type=_within(0, _MOST_TRACES), default=0, help="honest traces to judge, where more than --traces")
    add(
        "--calibration", type=_within(0, _MOST_TRACES), default=32,
        help="traces to calibrate by; 0: the fixed limits, without scores",
    )  # fmt: skip
    add(
        "--tokens",
        type=_within(0, MAX_TRACE_TOKENS),
        default=64,
        help="tokens of a trace, about (default 64); 0: the tasks as they are",
    )
    add("--environment", help="draw its tasks, one after the other (default: a writing task)")
    add("--only", action="append", default=[], help="run this control alone; repeatable")
    add(
        "--seed", type=_within(0, 2**32 - 1), default=0, help="of the throw-away keys, and so of every draw (default 0)"
    )
    add("--json", action="store_true", help="print one JSON object (SPEC 14)")
    add("--html", type=Path, help="write a page with the distributions drawn")
    controls.set_defaults(command=_controls)


def _controls(options: argparse.Namespace) -> int:
    from protocol.outputs import write_whole
    from verify.arguments import require_controls

    verifier_dtypes = tuple(dict.fromkeys(options.verifier_dtype or [options.dtype]))
    require_controls(options.policy, options.environment, options.dtype, verifier_dtypes, options.html)
    from verify.controls import Plan, run_controls
    from verify.controls_page import page
    from verify.controls_report import as_json, print_reports

    plan = Plan(
        policy=options.policy,
        dtype=options.dtype,
        verifier_dtypes=verifier_dtypes,
        traces=options.traces,
        honest=options.honest,
        calibration=options.calibration,
        tokens=options.tokens,
        environment=options.environment,
        only=tuple(options.only),
        seed=options.seed,
    )
    reports = run_controls(plan, lambda text: print(text, file=sys.stderr, flush=True))
    if options.json:
        print(json.dumps(as_json(reports)))
    else:
        print_reports(reports)
    if options.html is not None:  # last: what was computed is not lost where a disk is full
        write_whole("the page", options.html, page(reports).encode())
    return 0 if all(report.met for report in reports) else 1


_CALIBRATE_EPILOG = f"""exit codes:
  0  calibrated: the file is written
  1  refused: the pair is too noisy to tell int8 from honest; nothing is written
  2  unusable input: too few tokens, other policies' traces, wrong arguments, a file that cannot be written there
  3  this machine failed (out of memory, a full disk, an environment that raised)
{_ENDINGS}"""


def _add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure what honest evidence of a pair of engines looks like",
        epilog=_CALIBRATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = calibrate.add_argument
    add("--policy", type=Path, required=True, help="folder of the policy")
    add("--worker-dtype", required=True, help="in which nodes compute: float32 or bfloat16")
    add("--verifier-dtype", required=True, help="in which auditors recompute: float32 or bfloat16")
    add("--traces", type=Path, help="folder of trace files of trusted nodes, instead of drawing here")
    add("--traces-count", type=_within(1, _MOST_TRACES), default=32, help="episodes drawn here (default 32)")
    add("--tokens", type=_within(1, MAX_TRACE_TOKENS), default=64, help="tokens of a turn drawn here (default 64)")
    add("--environment", default="tools8@1", help="whose tasks are drawn here (default tools8@1)")
    add("--parameters", default="", help="the environment's own text")
    add("--worker-engine", default="transformers", help="the engine that drawing here stands for")
    add("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    add("--key", type=Path, default=Path("calibrate.key"), help="key that signs, created where missing")
    add("--out", type=Path, required=True, help="file to write")
    add("--json", action="store_true", help="print one JSON object (SPEC 14)")
    calibrate.set_defaults(command=_calibrate)


def _calibrate(options: argparse.Namespace) -> int:
    from verify.arguments import require_calibrating
    from verify.report import calibration_json, print_calibration

    environment, dtypes = (options.environment, options.parameters), (options.worker_dtype, options.verifier_dtype)
    require_calibrating(options.policy, options.traces, environment, dtypes, options.key, options.out)
    from verify.calibrate import Order, TooNoisy, carry_out

    order = Order(
        policy=options.policy,
        worker_dtype=options.worker_dtype,
        verifier_dtype=options.verifier_dtype,
        trusted=options.traces,
        traces=options.traces_count,
        tokens=options.tokens,
        environment=environment,
        worker_engine=options.worker_engine,
        device=options.device,
        key=options.key,
        out=options.out,
    )
    try:
        calibration = carry_out(order, created_ms=time.time_ns() // 1_000_000)
    except TooNoisy as error:
        return _fail(error, 1)
    if options.json:
        print(json.dumps(calibration_json(calibration, options.out)))
    else:
        print_calibration(calibration)
        print(f"written  {options.out}, signed by the key in {options.key}: keep that file to yourself")
    return 0


def _check(options: argparse.Namespace) -> int:
    from protocol.verdict import Outcome
    from verify.files import read_evidence, require_policy, with_calibration, with_verdict
    from verify.report import as_json, print_verdict, worth_knowing

    evidence = read_evidence(options.trace)
    if options.verdict is not None:
        evidence = with_verdict(evidence, options.verdict)
    if options.calibration is not None:
        evidence = with_calibration(evidence, options.calibration)
    require_policy(options.policy, evidence.lease)
    from verify.judge import judge

    judged = judge(evidence, options.policy, device=options.device, with_model=not options.no_model)
    digest, theirs = evidence.signed_trace.digest, evidence.verdict
    held = evidence.calibration
    notes = () if held is None else worth_knowing(judged, held.calibration.pair)
    if options.json:
        print(json.dumps(as_json(judged, digest, theirs, notes)))
    else:
        print_verdict(judged, evidence.trace.node, digest, theirs, notes)
    return {Outcome.ACCEPTED: 0, Outcome.REFUSED: 1, Outcome.NOT_JUDGED: 3}[judged.outcome]


def _add_audit(commands: Any) -> None:
    audit = commands.add_parser(
        "audit",
        help="check the whole log of a run: seals, draws, scores, and the verdicts that can be reached again",
        epilog=_AUDIT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    audit.add_argument(
        "log", type=not_empty, help="folder written by `rltrainer export-log`, or the URL it is served at"
    )
    audit.add_argument("--policies", type=Path, help="folder of policy folders named by version (default: the log's)")
    which = audit.add_mutually_exclusive_group()
    which.add_argument(
        "--sample", type=_within(0, MAX_LOG_ITEMS), default=16, metavar="N",
        help="recompute N traces of each epoch by the model, drawn at random (default 16)",
    )  # fmt: skip
    which.add_argument("--all", action="store_true", help="recompute every trace that is there")
    audit.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default cpu)")
    audit.add_argument("--json", action="store_true", help="print one JSON object (SPEC 14)")
    audit.set_defaults(command=_audit)


def _within(least: int, most: int) -> Callable[[str], int]:
    """An argument's type: a whole number of that range."""

    def number(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or len(text) > 20 or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"'{text[:40]}' is not a whole number from {least} to {most:,}")
        return int(text)

    return number


def _audit(options: argparse.Namespace) -> int:
    from verify.arguments import require_folder
    from verify.log_source import open_source, read_index
    from verify.progress import Progress, shown

    require_folder(options.policies, "the folder that holds the policies' folders, named by version")
    source, progress = open_source(options.log), Progress()
    try:
        with shown(progress):
            read_index(source)
            from verify.rejudge import Rejudge
            from verify.run_audit import audit_run
            from verify.run_report import as_json, print_report

            rejudge = Rejudge(source, options.policies, None if options.all else options.sample, options.device)
            report = audit_run(source, rejudge, progress)
    finally:
        source.close()
    if options.json:
        print(json.dumps(as_json(report)))
    else:
        print_report(report)
    return 1 if report.disagreeing else 0


def _inspect(options: argparse.Namespace) -> int:
    from verify.arguments import require_policy_folder
    from verify.files import read_evidence

    evidence = read_evidence(options.trace)
    if options.policy is not None:
        require_policy_folder(options.policy)
    from verify.inspect import as_json, print_trace
    from verify.reading import read_again

    reading = read_again(evidence, options.policy, options.device) if options.recompute else None
    if options.json:
        print(json.dumps(as_json(evidence, options.policy, reading)))
    else:
        print_trace(evidence, options.policy, reading, whole=options.all)
    return 0


if __name__ == "__main__":
    sys.exit(main())
