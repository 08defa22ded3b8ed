"""Settings that suit the two policies a run can start from without a model hub, as overrides of TrainerConfig.

Measured with the simulated loop of docs/log.md, on 2 CPU cores. Not here: the defaults themselves (config.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

# trainer/embedded on tools8@1: from a mean reward of .2 to over .6 in about 1,700 traces and 20 steps.
EMBEDDED: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "group_size": 8,
        "groups_per_step": 8,  # 16 need 1.4 times the traces for the same reward
        "max_turn_tokens": 16,
        "max_tokens": 128,
        "lease_seconds": 60.0,  # two turns take a second; the rest is for a busy machine
        "open_groups": 24,  # about three steps' worth in flight
        "learning_rate": 7e-4,  # 1e-3 is no faster and dips on the way up; 5e-4 needs a fifth more traces
        "warmup_steps": 5,
        "loss_tokens": 1024,  # about what 64 completions of tools8@1 hold
        "micro_batch_tokens": 2048,  # larger ones leave the cache: 0.155 s a step against 0.194 s at 8192
        "staleness_target": 3,
        "keep_policies": 10_000,  # 0.2 MB each: the whole run can be audited afterwards
    }
)

# SmolLM2-135M-Instruct on letters@1: a version every minute or so beside two nodes on the same two cores.
SMOLLM2: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "group_size": 4,
        "groups_per_step": 2,
        "max_turn_tokens": 32,
        "max_tokens": 64,
        "lease_seconds": 180.0,
        "open_groups": 8,
        "audit_first": 8,
        "auditor_batch_tokens": 2048,
        "learning_rate": 1e-5,
        "warmup_steps": 1,
        "loss_tokens": 256,
        "micro_batch_tokens": 512,
        "keep_policies": 10,  # 270 MB each
    }
)

PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {"none": MappingProxyType({}), "embedded": EMBEDDED, "smollm2": SMOLLM2}
)
