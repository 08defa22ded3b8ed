"""What one trainer may choose for itself, with units and reasons. Kept as RUN/config.toml.

Not here: numbers both sides must agree on (protocol/limits.py) and what never changes in a run
(the genesis).
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from protocol import limits
from protocol.errors import DecodeError, UsageError
from protocol.identity import node_from_peer_id, peer_id
from protocol.net.base import Address, listen_endpoint
from protocol.outputs import cause
from trainer.advantage import ADVANTAGES
from trainer.audit_draw import LAST_VERSION
from verify.standing import LEAST_FIRST

# Settings that name something, and the names there are. Losses live beside torch, which a configuration does not load.
NAMED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "loss": ("difference", "grpo", "two-sided", "cispo", "token-tis", "gspo"),
        "advantage": tuple(ADVANTAGES),
        "schedule": ("constant", "linear", "cosine"),
        "placement": ("disaggregated", "colocated", "both"),
    }
)


LONGEST_WAIT: Final = 2_592_000.0  # of a setting in seconds: thirty days; in minutes, more than anyone waits
SELF: Final = "self"  # in a list of nodes, in the place of a peer id: the home engine's


def require_peer_id(word: str, where: str) -> None:
    """Raises UsageError for what is neither a node's id nor SELF."""
    if word == SELF:
        return
    try:
        node_from_peer_id(word)
    except DecodeError as error:
        raise UsageError(f"{where}: {error}: `rlnode key show` prints a node's id") from None


@dataclass(frozen=True, slots=True)
class TrainerConfig:
    """Checked on construction; raises UsageError naming the field."""

    # network
    listen: str = "/ip4/0.0.0.0/tcp/4001"  # multiaddr the gateway listens on; tcp/0 takes a free port
    announce: str = ""  # multiaddr printed for nodes when it differs from `listen` (behind NAT, a DNS name)
    relay_mib_per_second: float = 2.0  # for nodes behind NAT to reach each other, all together; 0: it is no relay
    relay_nodes: int = 256  # nodes behind NAT that others reach through it
    relay_circuits: int = 64  # pairs of nodes connected through it at once; most find a direct way soon
    relay_circuit_mib: int = 256  # one pair; then it connects anew
    relay_circuit_minutes: float = 30.0
    page_host: str = "127.0.0.1"  # the page shows node ids and needs no login: open it up on purpose only
    page_port: int = 8420  # 0 takes a free port

    # rollouts
    group_size: int = 8  # completions of one task; the group's mean reward is the baseline
    groups_per_step: int = 16  # informative groups in one learner step
    temperature: float = 1.0  # other values bias the importance ratio unless the loss knows
    max_turn_tokens: int = 512  # tokens a model may draw in one turn; an environment may ask for fewer
    max_tokens: int = 4096  # tokens after the prompt, drawn and observed
    # deadline of a lease whose completions draw up to 1,024 tokens; late ones are leased again with the same seed
    lease_seconds: float = 120.0
    # more for each token they may draw beyond: 20 tokens/s a completion, what a busy GPU or a CPU still does. So 4,096
    # tokens get 274 s; 0: the same deadline for all, by which long completions are lost first
    lease_token_seconds: float = 0.05
    node_group_share: float = 0.5  # most of a group one node may draw while others are connected
    slot_attempts: int = 4  # leases of one slot before its group is given up
    # groups being drawn at once, up to four times as many where few of them teach something; staleness_target mostly
    # holds fewer. Each lease reads them all: some ms for a thousand slots
    open_groups: int = 48

    # audit (SPEC 10.7)
    audit_floor: float = 0.05  # least share of a node's traces that are recomputed, however many passed
    audit_first: int = 32  # audits of a new node, or after a failed one, before fewer are recomputed
    trust: tuple[str, ...] = ()  # peer ids of nodes audited at audit_floor from their first trace, until one lies
    auditors: int = 1  # auditor processes
    auditor_batch_tokens: int = 16384  # tokens in one prefill batch
    auditor_seconds: float = 600.0  # an auditor that takes longer for one batch is ended; reading a policy counts
    # an auditor that holds more is ended; 0: it is the first that the system ends. Calibrating holds the policy twice
    auditor_memory_mib: int = 0

    # learning (docs of each: trainer/loss.py)
    loss: str = "difference"  # difference, grpo, two-sided, cispo, token-tis or gspo
    advantage: str = "mean"  # mean, grpo (over the standard deviation) or rloo
    learning_rate: float = 1e-6
    warmup_steps: int = 10
    schedule: str = "constant"  # constant, linear or cosine: from warm-up's end down to final_learning_rate
    schedule_steps: int = 0  # steps until final_learning_rate is reached; 0: `steps`
    final_learning_rate: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    weight_decay: float = 0.0
    gradient_clip: float = 1.0  # global norm
    mask_difference: float = 0.2  # probability difference beyond which a token leaves the loss
    ratio_cap: float = 4.0  # cap of exp(log pi - log mu): of difference, two-sided and token-tis
    clip_low: float = 0.0  # of grpo, two-sided and gspo; 0: the loss's own
    clip_high: float = 0.0  # of these and cispo; above clip_low it is DAPO's clip-higher, 0.28 there
    log_ratio_penalty: float = 1e-3  # weight of the squared log ratio
    loss_tokens: int = 0  # constant the loss is divided by; 0: group_size * groups_per_step * max_turn_tokens
    length_penalty: float = 0.0  # taken from the reward of a completion as long as max_tokens; 0: none
    length_ramp: int = 0  # drawn tokens below max_tokens from which it grows; 0: a fifth of max_tokens
    mask_overlong: bool = False  # leave completions that were cut off out of the loss; their group's mean keeps them
    node_batch_share: float = 0.5  # most of a batch one node may have drawn while groups of others wait
    micro_batch_tokens: int = 8192  # tokens in one forward and backward
    lora_rank: int = 0  # above 0 only matrices of this rank beside the linear layers learn (LoRA), merged for nodes
    lora_alpha: float = 32.0  # their update is scaled by lora_alpha / lora_rank
    # learner processes, each with its share of a batch, of the weights and of the optimiser (FSDP2); on GPUs one a card
    learners: int = 1
    evaluate_every: int = 0  # versions between evaluations on held-out tasks by this machine; 0: none
    evaluate_tasks: int = 64  # of one evaluation, one completion each
    gradient_checkpointing: bool = False  # compute activations twice: a third slower, memory of one layer
    # versions between the policy that draws a group and the one that learns from it: nothing is leased that would be
    # used later, going by what waits and is drawn before it (pacing.py). 0: the learner and the nodes take turns
    staleness_target: int = 4
    staleness_limit: int = 8  # versions; an older group is dropped, however it came to be so old
    steps: int = 0  # stop after so many policy versions; 0: go on

    stall_seconds: float = 1800.0  # a part with work that does none for so long is started again; above a step's time

    # machine
    # who generates: nodes (disaggregated), this machine's own engine in turns with the learner (colocated), or both
    placement: str = "disaggregated"
    home_gpu_memory: float = 0.4  # of the card, for the home engine to take; learner and auditors have the rest
    device: str = "cpu"  # of learner and auditors: "cpu", "cuda", "cuda:1"
    dtype: str = "float32"  # in which the learner computes; masters are float32 always
    threads: int = 1  # torch threads of each process
    keep_policies: int = 12  # versions kept on disk; never fewer than the staleness limit needs
    keep_traces: int = 20_000  # trace bodies kept in the ledger; digests and verdicts stay for ever

    @property
    def last_version(self) -> int:
        """Of the policies that the run makes: `steps`, or all that a run can have."""
        return min(self.steps or LAST_VERSION, LAST_VERSION)

    def __post_init__(self) -> None:
        for name in (each.name for each in dataclasses.fields(self)):
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"config: {name} = {value!r} must be a number that has an end")
            if name.endswith(("_seconds", "_minutes")) and value > LONGEST_WAIT:
                raise UsageError(f"config: {name} = {value!r} may be at most {LONGEST_WAIT:,.0f}")
        for name, known in NAMED.items():
            if getattr(self, name) not in known:
                raise UsageError(f"config: {name} = {getattr(self, name)!r} is not known; known: {', '.join(known)}")
        positive = (
            "group_size", "groups_per_step", "max_turn_tokens", "max_tokens", "lease_seconds", "slot_attempts",
            "open_groups", "auditors", "auditor_batch_tokens", "auditor_seconds", "learning_rate",
            "gradient_clip", "ratio_cap", "micro_batch_tokens", "staleness_limit", "threads", "keep_traces",
            "lora_alpha", "learners", "evaluate_tasks",
            "stall_seconds",
            "temperature", "relay_nodes", "relay_circuits", "relay_circuit_mib", "relay_circuit_minutes",
        )  # fmt: skip
        for name in positive:
            if not getattr(self, name) > 0:
                raise UsageError(f"config: {name} = {getattr(self, name)!r} must be above 0")
        from_zero = (
            "relay_mib_per_second", "auditor_memory_mib", "warmup_steps", "weight_decay", "loss_tokens",
            "staleness_target", "steps", "lease_token_seconds",
            "log_ratio_penalty", "clip_low", "clip_high", "length_penalty", "length_ramp", "schedule_steps",
            "final_learning_rate", "lora_rank", "evaluate_every",
        )  # fmt: skip
        for name in from_zero:
            if getattr(self, name) < 0:
                raise UsageError(f"config: {name} = {getattr(self, name)!r} must not be below 0")
        try:
            listen_endpoint(self.listen)
            if self.announce:
                Address.parse(f"{self.announce}/p2p/{peer_id(bytes(32))}")
        except UsageError as error:
            raise UsageError(f"config: listen or announce: {error}") from None
        if not 0 <= self.page_port <= 65_535:
            raise UsageError(f"config: page_port = {self.page_port} must be from 0 to 65535")
        if not 2 <= self.group_size <= limits.MAX_GROUP_SIZE:
            raise UsageError(f"config: group_size must be from 2 to {limits.MAX_GROUP_SIZE}")
        if self.max_tokens > limits.MAX_TRACE_TOKENS:
            raise UsageError(f"config: max_tokens may be at most {limits.MAX_TRACE_TOKENS}")
        if self.clip_low >= 1.0:
            raise UsageError("config: clip_low must be below 1: a ratio is never below 0")
        if not self.length_ramp <= self.max_tokens:
            raise UsageError("config: length_ramp may be at most max_tokens")
        if not 0.0 < self.node_batch_share <= 1.0:
            raise UsageError("config: node_batch_share must be above 0 and at most 1")
        if self.schedule != "constant" and not self.schedule_steps and not self.steps:
            raise UsageError(f"config: schedule = {self.schedule!r} must know its end: set schedule_steps, or steps")
        if not 0.0 < self.home_gpu_memory <= 1.0:
            raise UsageError("config: home_gpu_memory is a share of the card, above 0 and at most 1")
        if not all(isinstance(word, str) for word in self.trust):
            raise UsageError(f"config: trust = {list(self.trust)!r} must hold peer ids, each in quotes")
        for word in self.trust:
            require_peer_id(word, "config: trust")
        if not 0.0 < self.audit_floor <= 1.0:
            raise UsageError("config: audit_floor must be above 0 and at most 1: without audits nothing is verified")
        if self.audit_first < LEAST_FIRST:
            raise UsageError(f"config: audit_first must be at least {LEAST_FIRST}: fewer audits say nothing of a node")
        if self.keep_policies <= self.staleness_limit + 1:
            raise UsageError("config: keep_policies must be above staleness_limit + 1, or audits lack their policy")


def load_config(path: Path) -> TrainerConfig:
    """Read config.toml. Raises UsageError naming file, field and what is known."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no {path}: make a run first with `rltrainer init {path.parent}`") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {cause(error)}: mend it, or restore it from a backup") from None
    return config_from(table, str(path))


def config_from(table: dict[str, object], where: str) -> TrainerConfig:
    """A config from a table of fields; each must be known and of its type. Raises UsageError."""
    known = {field.name: field for field in dataclasses.fields(TrainerConfig)}
    values: dict[str, object] = {}
    for name, value in table.items():
        if name not in known:
            raise UsageError(f"{where}: '{name}' is not a setting; known: {', '.join(sorted(known))}")
        wanted = type(known[name].default)
        if wanted is float and type(value) is int:
            value = float(value)
        if wanted is tuple and type(value) is list:
            value = tuple(value)
        if type(value) is not wanted:
            kind = "a list" if wanted is tuple else wanted.__name__
            raise UsageError(f"{where}: {name} should be {kind}, not {value!r}")
        values[name] = value
    return TrainerConfig(**values)  # type: ignore[arg-type]


def write_config(config: TrainerConfig, path: Path) -> None:
    """Write every setting, so that a run does not change when defaults do."""
    lines = ["# Settings of this run; each is explained in trainer/config.py.\n"]
    # JSON's numbers and strings are TOML's.
    lines += [f"{field.name} = {json.dumps(getattr(config, field.name))}\n" for field in dataclasses.fields(config)]
    path.write_text("".join(lines), encoding="utf-8")
