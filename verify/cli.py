"""rlverify: audit a trace offline, trusting neither the node nor the trainer (SPEC 14)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

BROKEN_PIPE = 141  # 128 + SIGPIPE, as a shell reports it

_EPILOG = """exit codes:
  0  accepted: every check passed
  1  refused: a check failed; its reason, value and limit are printed
  2  unusable input: no verdict (not a trace file, another policy's folder, wrong arguments)
  3  not judged: this machine failed (out of memory, an environment that raised)
  130, 141  no verdict: interrupted, or whoever read the output went away
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns the exit code."""
    options = _parser().parse_args(arguments)
    from protocol.errors import EnvironmentFault, LocalError, PolicyError, RLCommonsError

    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`): no verdict is implied, so none of the codes for one.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (PolicyError, EnvironmentFault, LocalError) as error:
        return _fail(error, 2 if isinstance(error, PolicyError) else 3)
    except RLCommonsError as error:
        return _fail(error, 2)
    except KeyboardInterrupt:
        return 130


def _fail(error: Exception, code: int) -> int:
    print(f"rlverify: {error}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlverify",
        description="Check a trace file: signatures, lease, replay of the task, seeded sampling, proofs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    check.add_argument("--json", action="store_true", help="print one JSON object (SPEC 14)")
    check.set_defaults(command=_check)
    inspect = commands.add_parser("inspect", help="show a trace as a person would want to read it")
    inspect.add_argument("trace", type=Path, help="file written by `rltrainer export-trace`")
    inspect.add_argument("--policy", type=Path, help="its policy folder: shows text beside token ids")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(command=_inspect)
    return parser


def _check(options: argparse.Namespace) -> int:
    from protocol.verdict import Outcome
    from verify.files import read_evidence, require_policy
    from verify.judge import judge
    from verify.report import as_json, print_verdict

    evidence = read_evidence(options.trace)
    require_policy(options.policy, evidence.lease)
    judged = judge(evidence, options.policy, device=options.device, with_model=not options.no_model)
    digest, theirs = evidence.signed_trace.digest, evidence.verdict
    if options.json:
        print(json.dumps(as_json(judged, digest, theirs)))
    else:
        print_verdict(judged, evidence.trace.node, digest, theirs)
    return {Outcome.ACCEPTED: 0, Outcome.REFUSED: 1, Outcome.NOT_JUDGED: 3}[judged.outcome]


def _inspect(options: argparse.Namespace) -> int:
    from verify.files import read_evidence
    from verify.inspect import as_json, print_trace

    evidence = read_evidence(options.trace)
    if options.json:
        print(json.dumps(as_json(evidence, options.policy)))
    else:
        print_trace(evidence, options.policy)
    return 0


if __name__ == "__main__":
    sys.exit(main())
