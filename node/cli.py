"""rlnode: join a run with this machine, see how it is doing, keep its identity.

Heavy libraries are imported inside the commands. Not here: what a command does beyond arguments, exit codes and
printing.
"""

from __future__ import annotations

import protocol.interrupts  # noqa: F401 - first: from here on Ctrl-C ends this without a traceback

# isort: split
import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from protocol.arguments import Parser, add_version
from protocol.errors import LocalError, RemoteError, RLCommonsError, UsageError

if TYPE_CHECKING:
    import trio

    from node.config import NodeConfig
    from node.report import Report, Status
    from protocol.identity import Identity
    from protocol.run import RunAddress

OK: Final = 0
REFUSED: Final = 1
USAGE: Final = 2
LOCAL_FAULT: Final = 3
INTERRUPTED: Final = 130
_END_SECONDS: Final = 10.0  # after stdin's end, to stop in order

_EXIT_CODES: Final = """\
exit codes:
  0    done (join: stopped as asked)
  1    join: the trainer refuses this node and waiting would not help; doctor: something must be done;
       reaudit: the trainer says no; store verify: something is damaged
  2    wrong arguments, or an address or file that cannot be used
  3    a fault of this machine: disk, key file, engine
  130  interrupted by Ctrl-C (join: a second time, before everything was sent)
  141  whoever read the output went away (`| head`)
"""


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="rlnode",
        description="Work for a reinforcement learning run: draw completions, prove them, send them in.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    home = argparse.ArgumentParser(add_help=False)
    home.add_argument(
        "--home", type=Path, metavar="FOLDER", help="this node's folder (default: $RLNODE_HOME or ~/.rlnode)"
    )
    as_json = argparse.ArgumentParser(add_help=False)
    as_json.add_argument("--json", action="store_true", help="one JSON object a line")

    join = commands.add_parser("join", parents=[home, as_json], help="work for a run until stopped with Ctrl-C")
    join.add_argument(
        "address", nargs="?", metavar="ADDRESS", help="the line `rltrainer serve` prints; remembered for next time"
    )
    device = join.add_mutually_exclusive_group()
    device.add_argument("--gpu", metavar="N[,M]", help="use CUDA device N, or several together (vLLM)")
    device.add_argument("--cpu", action="store_true", help="use the processor (the default)")
    join.add_argument(
        "--engine",
        choices=("vllm", "transformers"),
        help="what draws the tokens (default: vllm on a GPU where it is installed, else transformers)",
    )
    join.add_argument("--gpu-memory", type=float, metavar="SHARE", help="of the card, for vLLM to take (default 0.85)")
    join.add_argument("--max-vram", type=float, metavar="GIB", help="most for vLLM to take of each card")
    join.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="default: float32 on a processor, bfloat16 on a GPU"
    )
    join.add_argument(
        "--slots", type=int, metavar="N", help="completions drawn together (default: as the device has room for)"
    )
    join.add_argument("--nice", type=int, default=0, metavar="N", help="give way to others on this machine, 0 to 19")
    join.add_argument(
        "--on-new-policy",
        choices=("finish", "drop"),
        default="finish",
        help="what was begun under the older one: finish it (default), or drop it and give its leases back",
    )
    join.add_argument("--threads", type=int, metavar="N", help="of the engine on a processor (default: all)")
    join.add_argument("--listen", metavar="ADDRESS", help="for other nodes (default /ip4/0.0.0.0/tcp/0: any free port)")
    join.add_argument("--no-serve", action="store_true", help="give other nodes nothing; needs no open port")
    join.add_argument(
        "--upload-cap", type=float, metavar="MIB_PER_S", help="most to give to other nodes a second (default 10)"
    )
    join.add_argument(
        "--mirror", action="append", default=[], metavar="URL", help="a static copy of the policies; may be repeated"
    )
    join.add_argument(
        "--relay", action="append", default=[], metavar="ADDRESS", help="of an `rlnode relay`; may be repeated"
    )
    join.add_argument("--disk", type=float, metavar="GIB", help="most the home folder may hold (default: no limit)")

    join.add_argument(
        "--share-device",
        type=Path,
        metavar="FOLDER",
        help="draw in turns with the learner of this machine (set by rltrainer)",
    )
    join.add_argument("--end-with-stdin", action="store_true", help="stop, as after Ctrl-C, once stdin ends")

    relay = commands.add_parser(
        "relay", parents=[home, as_json], help="help nodes behind NAT: be found and reached at this machine"
    )
    relay.add_argument("address", nargs="?", metavar="ADDRESS", help="of the run (default: the one joined last)")
    relay.add_argument("--listen", default="/ip4/0.0.0.0/tcp/4002", metavar="ADDRESS", help="(default: port 4002)")
    relay.add_argument("--rate", type=float, default=10.0, metavar="MIB_PER_S", help="most to relay (default 10)")

    doctor = commands.add_parser("doctor", parents=[home, as_json], help="what works, what does not, what to do")
    doctor.add_argument("address", nargs="?", metavar="ADDRESS", help="of the run (default: the one joined last)")
    doctor.add_argument("--gpu", metavar="N[,M]", help="check CUDA device N")

    commands.add_parser("status", parents=[home, as_json], help="how the node of this home is doing")

    reaudit = commands.add_parser(
        "reaudit", parents=[home, as_json], help="have a trace that an audit refused audited again, once"
    )
    reaudit.add_argument("digest", metavar="DIGEST", help="first hex digits of the trace's digest (see verdicts.log)")

    store = commands.add_parser("store", help="what the home holds: list it, check it, make room")
    doings = store.add_subparsers(dest="action", required=True, metavar="ACTION")
    doings.add_parser("ls", parents=[home, as_json], help="policies, what each is kept for, and the rest by size")
    doings.add_parser("verify", parents=[home, as_json], help="compute every root and digest again (reads everything)")
    doings.add_parser("gc", parents=[home, as_json], help="give up what nothing needs; a running node is not disturbed")

    key = commands.add_parser("key", help="make, show, back up or restore this node's identity")
    actions = key.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("show", parents=[home], help="print the node's id")
    actions.add_parser("new", parents=[home], help="make the key of a new home and print the id, before it ever joins")
    backup = actions.add_parser("backup", parents=[home], help="copy the key to FILE (keep it secret)")
    backup.add_argument("file", type=Path, metavar="FILE")
    restore = actions.add_parser("restore", parents=[home], help="take the key in FILE as this home's identity")
    restore.add_argument("file", type=Path, metavar="FILE")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    commands = {
        "join": _join,
        "relay": _relay,
        "doctor": _doctor,
        "status": _status,
        "reaudit": _reaudit,
        "store": _store,
        "key": _key,
    }
    return _ended(lambda: commands[options.command](options), as_json=getattr(options, "json", False))


def _ended(command: Callable[[], int], *, as_json: bool) -> int:
    from protocol.command import carry_out

    return carry_out("rlnode", command, lambda error: _fail(error, as_json=as_json))


def _fail(error: RLCommonsError, *, as_json: bool) -> int:
    code = exit_code(error)
    if as_json:
        kind = str(error.code) if isinstance(error, RemoteError) else type(error).__name__
        print(json.dumps({"event": "failed", "error": kind, "text": str(error), "exit": code}), flush=True)
    else:
        from protocol.outputs import printable

        print(f"rlnode: {printable(str(error))}", file=sys.stderr)
    return code


def exit_code(error: RLCommonsError) -> int:
    if isinstance(error, UsageError):
        return USAGE
    return LOCAL_FAULT if isinstance(error, LocalError) else REFUSED


def _home(options: argparse.Namespace) -> Path:
    from node.config import default_home

    home = Path(options.home or default_home()).expanduser().absolute()
    if os.path.lexists(home) and not home.is_dir():
        raise UsageError(f"{home} is not a folder: give --home the folder that this node keeps its things in")
    return home


# --- join ---


def _join(options: argparse.Namespace) -> int:
    from protocol.net.base import Address

    home = _home(options)
    address = _address(options.address, home)
    if address is None:
        raise UsageError(
            f"{home} has no address yet: rlnode join ADDRESS, where ADDRESS is the line that `rltrainer serve` prints"
        )
    Address.parse(address.dial)  # before anything is made or remembered: a typo must not replace a good address
    from protocol.heap import few_heaps

    few_heaps()
    import trio

    from node.config import GIB, NodeConfig, default_engine, default_threads
    from node.display import shown
    from node.mirror import check_mirror
    from node.report import Status

    for url in options.mirror:
        check_mirror(url)
    device = _device(options.gpu)
    asked = {"listen": options.listen, "upload_cap": options.upload_cap, "gpu_memory": options.gpu_memory}
    config = NodeConfig(
        address=address,
        home=home,
        engine=options.engine or default_engine(device),
        device=device,
        dtype=options.dtype,
        slots=options.slots,
        max_vram_bytes=None if options.max_vram is None else int(options.max_vram * GIB),
        turns=options.share_device,
        nice=options.nice,
        on_new_policy=options.on_new_policy,
        threads=options.threads if options.threads is not None else default_threads(),
        disk_bytes=None if options.disk is None else int(options.disk * GIB),
        serve=not options.no_serve,
        mirrors=tuple(options.mirror),
        relays=tuple(options.relay),
        **{name: value for name, value in asked.items() if value is not None},
    )
    status = Status()
    os.nice(config.nice)

    def work() -> int:
        with shown(status, as_json=options.json, out=sys.stdout) as report:
            code: int = trio.run(_join_until_signalled, config, report, status, options.end_with_stdin)
            return code

    code = _ended(work, as_json=options.json)
    _leave_threads_behind(code)
    return code


def _device(gpu: str | None) -> str:
    """Raises UsageError."""
    from node.cards import parse_cards

    return "cpu" if gpu is None else f"cuda:{','.join(map(str, parse_cards(gpu)))}"


def _leave_threads_behind(code: int) -> None:
    """End the process now if an engine's long step, or a hung environment, is still running: the interpreter
    would end under its feet, which crashes native code."""
    import threading

    from node.engine_thread import THREAD_NAME as ENGINE_THREAD
    from node.tasks import THREAD_NAME as ENVIRONMENT_THREAD

    if any(thread.name in (ENGINE_THREAD, ENVIRONMENT_THREAD) for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, AttributeError):  # nobody reads it any more, or it was never open
                stream.flush()
        os._exit(code)


def _address(text: str | None, home: Path) -> RunAddress | None:
    """The run's: as given, or as remembered."""
    from node.store import load_address
    from protocol.run import RunAddress

    return load_address(home) if text is None else RunAddress.parse(text)


async def _join_until_signalled(config: NodeConfig, report: Report, status: Status, with_stdin: bool) -> int:
    """The first Ctrl-C stops in order, the second at once. `with_stdin`: so does the end of stdin, whose other end the
    process that started this one holds, and loses when it is killed."""
    import trio

    from node.failures import foremost
    from node.join import join

    stop, at_once = trio.Event(), trio.CancelScope()
    with foremost(), at_once:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_listen_to_signals, stop, at_once)
            if with_stdin:
                nursery.start_soon(_watch_stdin, stop, at_once)
            nursery.start_soon(_stay_small, status)
            await join(config, report, status, stop)
            nursery.cancel_scope.cancel()
    return INTERRUPTED if at_once.cancelled_caught else OK


async def _stay_small(status: Status) -> None:
    """From the first policy on: with it all is loaded."""
    import trio

    from protocol.heap import GIVE_BACK_SECONDS, give_back, settle

    while status.policy_version is None:
        await trio.sleep(1)
    settle()
    while True:
        await trio.sleep(GIVE_BACK_SECONDS)
        give_back()


async def _listen_to_signals(stop: trio.Event, at_once: trio.CancelScope) -> None:
    import signal

    import trio

    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if stop.is_set():
                at_once.cancel()
            stop.set()


async def _watch_stdin(stop: trio.Event, at_once: trio.CancelScope) -> None:
    import trio

    def read() -> None:
        while os.read(0, 4096):
            pass

    # trio-typing, which libp2p brings along, describes an older trio.
    await trio.to_thread.run_sync(read, abandon_on_cancel=True)  # type: ignore[call-arg]
    stop.set()
    await trio.sleep(_END_SECONDS)
    at_once.cancel()


# --- relay ---


def _relay(options: argparse.Namespace) -> int:
    import trio

    from node.display import json_lines, plain_lines

    home = _home(options)
    address = _address(options.address, home)
    if address is None:
        raise UsageError("rlnode relay ADDRESS, where ADDRESS is the line that `rltrainer serve` prints")
    if not options.rate > 0:
        raise UsageError("--rate must be more than 0 MiB a second")
    report = (json_lines if options.json else plain_lines)(sys.stdout)
    code: int = trio.run(_relay_until_signalled, home, address, options.listen, options.rate, report)
    return code


async def _relay_until_signalled(home: Path, address: RunAddress, listen: str, rate: float, report: Report) -> int:
    import trio

    from node import store
    from node.point import MeetingPoint
    from node.report import Event
    from protocol.net import p2p
    from protocol.net.base import RelayLimits

    stop = trio.Event()
    with store.Home(home) as held:
        identity, _ = held.load_or_make_identity()
        async with p2p.open_host(identity, listen=(listen,)) as host, trio.open_nursery() as nursery:
            nursery.start_soon(_listen_to_signals, stop, nursery.cancel_scope)
            await nursery.start(
                MeetingPoint(address, identity.node, report).run, host, RelayLimits(bytes_per_second=rate * 1024**2)
            )
            for where in host.addresses:
                report(Event("listening", f"rlnode join --relay {where}", values={"address": where}))
            await stop.wait()
            nursery.cancel_scope.cancel()
    return OK


# --- status and doctor ---


def _status(options: argparse.Namespace) -> int:
    from node.display import describe_status
    from node.report import at_rest
    from node.store import lock_holder, read_status

    home = _home(options)
    status = read_status(home)
    holder = lock_holder(home)
    if status is None:
        raise UsageError(f"no node has run in {home} yet: rlnode join ADDRESS")
    status = status if holder is not None else at_rest(status)
    status["running"] = holder is not None
    status["process"] = holder
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(json.dumps(status) if options.json else describe_status(status, width))
    return OK


def _doctor(options: argparse.Namespace) -> int:
    home = _home(options)
    address = _address(options.address, home)
    from node.doctor import examine

    device = _device(options.gpu)
    worst = OK
    for finding in examine(home, address, device):
        print(finding.json() if options.json else finding.line(), flush=True)
        worst = max(worst, REFUSED if finding.needs_action else OK)
    return worst


# --- reaudit ---


def _reaudit(options: argparse.Namespace) -> int:
    from node.store import Home, load_address, lock_holder, run_folder

    home = _home(options)
    address = load_address(home)
    if address is None:
        raise UsageError(f"no node has run in {home} yet: rlnode join ADDRESS")
    from node.display import json_lines, plain_lines
    from node.reaudit import ask_alone, find_trace, hand_over
    from protocol.outputs import printable

    folder = run_folder(home, address.run)
    digest = find_trace(folder, options.digest)
    if lock_holder(home) is not None:
        answer = hand_over(home, folder, digest)
    else:
        with Home(home) as held:
            identity, _ = held.load_or_make_identity()
            report = json_lines(sys.stdout) if options.json else plain_lines(sys.stdout)
            answer = ask_alone(address, identity, digest, report)
    values = {"event": "reaudit", "trace": digest.hex(), "granted": answer.granted, "text": answer.text}
    print(json.dumps(values) if options.json else printable(answer.text))
    return OK if answer.granted else REFUSED


# --- store ---


def _store(options: argparse.Namespace) -> int:
    from node.housekeeping import run_folders

    home = _home(options)
    if not run_folders(home):
        raise UsageError(f"no node has run in {home} yet: rlnode join ADDRESS")
    return {"ls": _store_ls, "verify": _store_verify, "gc": _store_gc}[options.action](home, options.json)


def _store_ls(home: Path, as_json: bool) -> int:
    from node.housekeeping import look
    from node.store import size_text

    for holding in look(home):
        if as_json:
            print(json.dumps(holding.plain()))
            continue
        print(f"run {holding.run}…  {size_text(holding.bytes)}")
        for policy in holding.policies:
            why = ", ".join(policy.reasons) or "may go"
            print(f"  policy {policy.version:<6} {policy.root[:16]}…  {size_text(policy.bytes):>10}  {why}")
        print(f"  {holding.pieces} pieces of downloads and deltas, {size_text(holding.piece_bytes)}")
        print(f"  {holding.unsent_traces} unsent traces, {holding.leases} leases")
    return OK


def _store_verify(home: Path, as_json: bool) -> int:
    from node.housekeeping import verify

    damaged = 0
    for damage in verify(home):
        damaged += 1
        text = f"{damage.path}: {damage.what}; remove it, and it is fetched again when it is needed"
        print(json.dumps({"path": damage.path, "what": damage.what}) if as_json else text, flush=True)
    if not damaged and not as_json:
        print(f"everything in {home} is what its name says")
    return REFUSED if damaged else OK


def _store_gc(home: Path, as_json: bool) -> int:
    from node.housekeeping import collect
    from node.store import size_text

    gone, freed = collect(home)
    if as_json:
        print(json.dumps({"removed": gone, "bytes": freed}))
    else:
        print(f"{size_text(freed)} freed: {', '.join(gone)}" if gone else "nothing is there that may go")
    return OK


# --- key ---


def _key(options: argparse.Namespace) -> int:
    from node.store import Home, key_path, lock_holder
    from protocol.identity import load_identity

    home = _home(options)
    if options.action in ("show", "backup") and not os.path.lexists(key_path(home)):
        raise UsageError(
            f"there is no key in {home}: give --home the folder of a node, or make a key (rlnode key new), or take one "
            "that was backed up (rlnode key restore FILE)"
        )
    if options.action == "show":
        print(load_identity(key_path(home)).peer_id)
    elif options.action == "new":
        with Home(home) as held:
            identity, made = held.load_or_make_identity()
        if not made:
            raise UsageError(f"{home} has a key already: it is {identity.peer_id}")
        print(identity.peer_id)
    elif options.action == "backup":
        identity = load_identity(key_path(home))
        if os.path.lexists(options.file):
            raise UsageError(f"{options.file} exists already and is not overwritten: name another file")
        _save_key(identity, options.file)
        print(f"{options.file} holds the key of {identity.peer_id}: whoever has it can act as this node")
    else:
        if lock_holder(home) is not None:
            raise UsageError(f"a node is running in {home}: stop it first")
        identity = _load_backup(options.file)
        if os.path.lexists(key_path(home)):
            raise UsageError(
                f"{home} has a key already, {key_path(home)}: move it away first, it may be somebody's identity, or "
                "give this one another --home"
            )
        _save_key(identity, key_path(home))
        print(f"{home} is now {identity.peer_id}; run this identity on one machine only")
    return OK


def _load_backup(path: Path) -> Identity:
    """Raises UsageError: another file would do."""
    from protocol.errors import KeyFileError
    from protocol.identity import load_identity

    if not os.path.isfile(path):
        why = "is not a file" if os.path.lexists(path) else "is not there"
        raise UsageError(f"{path} {why}: name the file that `rlnode key backup` wrote")
    try:
        return load_identity(path)
    except KeyFileError as error:
        raise UsageError(str(error)) from None


def _save_key(identity: Identity, path: Path) -> None:
    """Raises UsageError where another path would do, and KeyFileError or StorageError where this machine fails."""
    from protocol.identity import save_identity
    from protocol.outputs import check_target, unwritable

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable("the key", path, error) from None
    check_target("the key", path)
    save_identity(identity, path)


if __name__ == "__main__":
    sys.exit(main())
