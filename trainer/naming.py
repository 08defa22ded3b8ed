"""Which nodes a person names when a run is served: the home engine's, and those that are trusted until they lie.

Not here: what trust changes (standing.py), where it is kept (ledger_nodes.py), the home engine itself (home.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.errors import UsageError
from protocol.identity import node_from_peer_id
from trainer.config import SELF, TrainerConfig, require_peer_id
from trainer.ledger import Ledger
from trainer.rundir import Run
from trainer.standing import standing


def name_nodes(run: Run, ledger: Ledger, home: bytes | None, asked: Sequence[str]) -> None:
    """Write down who is named by the settings, and `asked` for now. Raises UsageError for what is no node's id."""
    trainer = run.genesis.trainer
    always = nodes_of(run.config.trust, f"trust in {run.folder.config}", trainer=trainer, home=home)
    anew = nodes_of(asked, "--trust", trainer=trainer, home=home)
    ledger.name_nodes(home=home, always=always, anew=anew)
    show_rates(ledger, run.config, ledger.seen_nodes())


def show_rates(ledger: Ledger, config: TrainerConfig, nodes: Iterable[bytes], *, known: bool = True) -> None:
    """Have nodes shown with the rate that follows from their audits and from trust as it is now. `known`: their pair
    of engines is calibrated (SPEC 10.7 item 2); the next draw says it again."""
    trusted, last = ledger.trusted(), ledger.last_verdict()
    with ledger.write():
        for node in nodes:
            rate = standing(ledger.latest_audits(node, last), config, trusted=node in trusted).rate
            ledger.note_rate(node, rate if known else 1.0)


def nodes_of(words: Iterable[str], where: str, *, trainer: bytes, home: bytes | None) -> frozenset[bytes]:
    """Peer ids as nodes; SELF as `home`. Raises UsageError naming the word that is none."""
    return frozenset(_node(word, where, trainer, home) for word in words)


def _node(word: str, where: str, trainer: bytes, home: bytes | None) -> bytes:
    if word == SELF:
        if home is None:
            raise UsageError(f"{where}: self is the home engine, and there is none: add --placement colocated, or both")
        return home
    require_peer_id(word, where)
    node = node_from_peer_id(word)
    if node == trainer:
        raise UsageError(f"{where}: {word} is this trainer's own id: name nodes, as `rlnode key show` prints them")
    return node
