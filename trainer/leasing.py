"""Acts on what dispatch decides: makes groups, signs leases, takes them back, gives up groups.

Every method runs in the clerk's thread, inside its transaction. Not here: who gets what (dispatch.py).
"""

from __future__ import annotations

import re
import secrets
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from protocol import codec, limits
from protocol.envelope import Signed, seal
from protocol.errors import Code, Refused
from protocol.identity import Identity
from protocol.lease import Lease, SeedInput, Slot, slot_seed
from protocol.messages import GetLeases, LeasesReply
from trainer import rates
from trainer.dispatch import Asking, Grant, GroupView, Situation, SlotView, choose, stranded
from trainer.ledger import Ledger
from trainer.ledger_rows import TOO_STALE, GroupRow, GroupState, LeaseState, OpenSlot
from trainer.pacing import lease_seconds
from trainer.rundir import Run
from trainer.shelf import Shelf
from trainer.standing import standing
from trainer.stock import Stock

ASKED_SECONDS: Final = 30.0  # a node that asked so lately counts as one that wants work
LOSSES_SECONDS: Final = 30.0  # between looks at what is being lost: it reads some thousand slots
LATE_SECONDS: Final = 2.0  # a lease is free again so long after its deadline: what arrived in time may still queue
_REPLY_BYTES: Final = 2 * 1024 * 1024  # of leases in one reply: long prompts could exceed a frame


_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Ask:
    """A node's last request for leases."""

    at_ms: int
    versions: frozenset[int]
    on_probation: bool


class Leasing:
    """Who holds what lies in the ledger; only who asked lately is kept in memory."""

    def __init__(self, run: Run, ledger: Ledger, signer: Identity, secret: bytes, shelf: Shelf, stock: Stock) -> None:
        self._run = run
        self._config = run.config
        self._ledger = ledger
        self._signer = signer
        self._secret = secret
        self._shelf = shelf
        self._stock = stock
        self._asks: dict[bytes, Ask] = {}
        self._unserved: dict[bytes, tuple[str, int]] = {}  # node → (why it got nothing, since when)
        self._lost: frozenset[str] = frozenset()  # what was said to be lost, without figures
        self._looked_ms = 0

    # --- giving ---

    def lease(self, node: bytes, request: GetLeases, connected: Collection[bytes], now_ms: int) -> LeasesReply:
        """What a node gets now, signed and in the ledger."""
        last = self._ledger.last_verdict()
        trusted = self._ledger.trust(node, last) is not None
        on_probation = standing(self._ledger.latest_audits(node, last), self._config, trusted=trusted).on_probation
        self._asks[node] = Ask(now_ms, frozenset(request.versions), on_probation)
        asking = Asking(
            node,
            request.slots,
            frozenset(request.versions),
            self._ledger.leased_slots(node),
            on_probation,
            self._ledger.trace_seconds(node, now_ms),
        )
        plan = choose(asking, self._situation(node, connected, now_ms), self._config)
        leases, cause = self._issue(node, plan.grants, now_ms)
        why = (cause or plan.cause)[: limits.MAX_TEXT_CHARACTERS]
        self._note_wait(node, "" if leases or not request.slots else why, now_ms)
        return LeasesReply(tuple(leases), plan.retry_ms, why)

    def _note_wait(self, node: bytes, why: str, now_ms: int) -> None:
        """Tell people what a node waits for; written when that changes, not for each number in it."""
        before, since_ms = self._unserved.get(node, ("", now_ms))
        if _NUMBER.sub("#", before) == _NUMBER.sub("#", why):
            return
        since_ms = since_ms if before and why else now_ms
        self._ledger.note_node_wait(node, why, since_ms)
        self._unserved[node] = (why, since_ms)

    def _situation(self, node: bytes, connected: Collection[bytes], now_ms: int) -> Situation:
        self._asks = {each: ask for each, ask in self._asks.items() if each in connected or each == node}
        self._unserved = {each: why for each, why in self._unserved.items() if each in self._asks}
        working = self._ledger.holders() | {
            each for each, ask in self._asks.items() if now_ms - ask.at_ms < ASKED_SECONDS * 1000
        }
        trusted = {each for each in working if each in connected and not self._is_on_probation(each)}
        return Situation(
            latest=self._shelf.latest,
            groups=tuple(self._groups()),
            others=len(trusted - {node}),
            consumption=self._ledger.consumption(now_ms),
            now_ms=now_ms,
        )

    def _is_on_probation(self, node: bytes) -> bool:
        return node in self._asks and self._asks[node].on_probation

    def _groups(self) -> list[GroupView]:
        refused: dict[tuple[bytes, int], set[bytes]] = defaultdict(set)
        for group_id, slot, node in self._ledger.refused_answers():
            refused[group_id, slot].add(node)
        groups: dict[bytes, list[OpenSlot]] = defaultdict(list)
        for row in self._ledger.open_slots():
            groups[row.group_id].append(row)
        return [
            GroupView(
                group_id,
                rows[0].policy_version,
                rows[0].created_ms,
                tuple(
                    SlotView(r.slot, r.state, r.node, r.attempts, frozenset(refused.get((group_id, r.slot), ())))
                    for r in rows
                ),
            )
            for group_id, rows in groups.items()
        ]

    def _issue(self, node: bytes, grants: tuple[Grant, ...], now_ms: int) -> tuple[list[Signed], str]:
        """The leases, and why there are fewer than granted."""
        leases: list[Signed] = []
        size = 0
        fault = self._stock.fault()
        if fault is not None:
            self._ledger.add_event(now_ms, "environment", f"a task was passed over: {fault}")
        for grant in grants:
            group = self._new_group(grant.version, now_ms) if grant.group_id is None else self._group(grant)
            if group is None:
                return leases, f"a fault of the trainer: {fault}" if fault else "the next tasks are being prepared"
            lease = self._sign(node, group, grant.slots, now_ms)
            leases.append(lease)
            size += len(lease.payload)
            if size > _REPLY_BYTES:
                break
        return leases, ""

    def _group(self, grant: Grant) -> GroupRow:
        assert grant.group_id is not None
        found = self._ledger.group(grant.group_id)
        assert found is not None
        return found[0]

    def _new_group(self, version: int, now_ms: int) -> GroupRow | None:
        """Make the next group of the run; None when its task is not ready."""
        task = self._stock.take()
        if task is None:
            return None
        group = GroupRow(
            group_id=secrets.token_bytes(16),
            environment=task.environment,
            parameters=task.parameters,
            task_index=task.index,
            policy_version=version,
            size=self._config.group_size,
            prompt=task.prompt,
            max_turn_tokens=min(self._config.max_turn_tokens, task.turn_tokens),
            created_ms=now_ms,
        )
        self._ledger.add_group(group, [self._seed(group, slot) for slot in range(group.size)])
        return group

    def _seed(self, group: GroupRow, slot: int) -> int:
        return slot_seed(
            SeedInput(
                run=self._run.run,
                policy_root=self._root(group.policy_version),
                environment=group.environment,
                parameters=group.parameters,
                task_index=group.task_index,
                group_id=group.group_id,
                slot=slot,
                secret=self._secret,
            )
        )

    def _root(self, version: int) -> bytes:
        root = self._shelf.root(version)
        if root is None:
            raise Refused(Code.NOT_FOUND, f"policy version {version} is no longer served: fetch the latest")
        return root

    def _sign(self, node: bytes, group: GroupRow, slots: tuple[int, ...], now_ms: int) -> Signed:
        # SPEC 10.7: nothing of an epoch is leased once the value of its draws is out.
        if group.policy_version < self._ledger.sealed():
            raise Refused(Code.NOT_FOUND, f"the epoch of policy {group.policy_version} is closed: fetch the latest")
        seeds = {row.slot: row.seed for row in self._ledger.slots_of(group.group_id)}
        lease = Lease(
            run=self._run.run,
            lease_id=secrets.token_bytes(16),
            node=node,
            policy_version=group.policy_version,
            policy_root=self._root(group.policy_version),
            environment=group.environment,
            parameters=group.parameters,
            task_index=group.task_index,
            group_id=group.group_id,
            group_size=group.size,
            slots=tuple(Slot(index, seeds[index]) for index in slots),
            prompt=group.prompt,
            temperature=self._config.temperature,
            max_turn_tokens=group.max_turn_tokens,
            max_tokens=self._config.max_tokens,
            issued_ms=now_ms,
            deadline_ms=now_ms + int(lease_seconds(self._config, self._most_drawn(group)) * 1000),
        )
        signed = seal(self._signer, lease)
        self._ledger.add_lease(
            lease.lease_id, node, group.group_id, slots, codec.encode(signed), now_ms, lease.deadline_ms
        )
        return signed

    def _most_drawn(self, group: GroupRow) -> int:
        """Tokens that a completion of it may draw."""
        turns = self._stock.turns(group.environment, group.parameters)
        return min(self._config.max_tokens, turns * group.max_turn_tokens)

    # --- taking back ---

    def give_back(self, node: bytes, lease_id: bytes) -> None:
        """A node gives up a lease. Raises Refused for a lease that is not its own."""
        found = self._ledger.lease(lease_id)
        if found is None or found[0] != node:
            raise Refused(Code.NOT_FOUND, f"lease {lease_id.hex()} is not one of this node's")
        self._ledger.end_lease(lease_id, LeaseState.RETURNED)

    def expire(self, now_ms: int) -> int:
        """Free the slots of leases past their deadline; how many."""
        due = self._ledger.due_leases(now_ms - int(LATE_SECONDS * 1000))
        return sum(self._ledger.end_lease(lease_id, LeaseState.EXPIRED) for lease_id in due)

    def tidy(self, connected: Collection[bytes], now_ms: int) -> None:
        """Give up groups that nobody will finish or that the learner may not use any more."""
        oldest = self._shelf.latest - self._config.staleness_limit
        limit = self._config.staleness_limit
        self._sound(now_ms)
        self._ledger.drop_stale_groups(oldest, f"{TOO_STALE}: more than {limit} versions behind")
        if not self._ledger.count_groups(GroupState.OPEN):
            return
        held = frozenset(version for node in connected if node in self._asks for version in self._asks[node].versions)
        for group_id, cause in stranded(self._groups(), held, self._shelf.latest, now_ms, self._config):
            self._ledger.drop_group(group_id, cause)

    def _sound(self, now_ms: int) -> None:
        """An event when some kind of trace begins to be lost, and when that is over."""
        if now_ms - self._looked_ms < LOSSES_SECONDS * 1000:
            return
        self._looked_ms = now_ms
        losses = {text.partition(":")[0]: text for text in rates.told(self._ledger, self._config)["losses"]}
        for name in losses.keys() - self._lost:
            self._ledger.add_event(now_ms, "alarm", losses[name])
        for name in self._lost - losses.keys():
            self._ledger.add_event(now_ms, "leases", f"over: {name}")
        self._lost = frozenset(losses)
