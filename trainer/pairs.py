"""Which pair of engines a trace and this trainer's auditors are, and what is known of it (SPEC 8.11).

A pair is calibrated, or new: then it is judged by the ceilings and audited at rate 1. Not here: the measuring
(trainer/calibrating.py, verify/calibrate.py).
"""

from __future__ import annotations

from typing import Final

from protocol.calibration import Pair
from protocol.trace import EngineDescriptor
from trainer.config import TrainerConfig

VERIFIER: Final = "transformers"  # what the auditors recompute with


def device_kind(device: str) -> str:
    """SPEC 8.11: what stands before the first colon."""
    return device.partition(":")[0][:16]


def pair_of(engine: EngineDescriptor, config: TrainerConfig) -> Pair:
    """A worker's engine, and this trainer's auditors, which recompute in the worker's dtype."""
    return Pair(
        worker_engine=engine.name,
        worker_dtype=engine.dtype,
        worker_device=device_kind(engine.device),
        verifier_engine=VERIFIER,
        verifier_dtype=engine.dtype,
        verifier_device=device_kind(config.device),
    )


def pair_name(pair: Pair) -> str:
    """One line for the ledger and for people."""
    worker = f"{pair.worker_engine} {pair.worker_dtype} {pair.worker_device}"
    return f"{worker} by {pair.verifier_engine} {pair.verifier_dtype} {pair.verifier_device}"
