"""Which pair of engines a trace and this trainer's auditors are (SPEC 8.11).

A pair is calibrated, or new: then it is judged by the ceilings and audited at rate 1. Not here: the measuring
(calibrating.py).
"""

from __future__ import annotations

from typing import Final

from protocol.calibration import Pair
from protocol.trace import EngineDescriptor
from trainer.config import TrainerConfig
from verify.files import device_kind

ENGINE: Final = "transformers"  # what the auditors recompute with


def pair_of(engine: EngineDescriptor, config: TrainerConfig) -> Pair:
    """A worker's engine, and this trainer's auditors, which recompute in the worker's dtype."""
    return _pair((engine.name, engine.dtype, device_kind(engine.device)), config)


def own_pair(config: TrainerConfig) -> Pair:
    """Nodes of the project's own engine on devices like this trainer's, in the learner's dtype."""
    return _pair((ENGINE, config.dtype, device_kind(config.device)), config)


def _pair(worker: tuple[str, str, str], config: TrainerConfig) -> Pair:
    return Pair(*worker, ENGINE, worker[1], device_kind(config.device))


def pair_name(pair: Pair) -> str:
    """One line for the ledger and for people."""
    worker = f"{pair.worker_engine or 'any engine'} {pair.worker_dtype} {pair.worker_device}".rstrip()
    return f"{worker} by {pair.verifier_engine} {pair.verifier_dtype} {pair.verifier_device}"
