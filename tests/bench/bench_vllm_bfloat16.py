"""vLLM in bfloat16 against the auditor's prefill in bfloat16: is an honest node inside what a calibration allows?

Draws completions of SmolLM2 on letters@1 with vLLM's CPU build. The first of them make a calibration of the pair, as
`rlverify calibrate --traces` does; the others are judged by it, and by what a pair is judged by that nobody measured:
the ceilings, and a provisional calibration after the project's own engine. Bar: none of 200 refused by any of the
three. Prints the rates and statistics. Slow: a CPU without bfloat16 units draws some ten tokens a second.
Without vLLM (`make vllm-env`) nothing is measured, which is said and is no failure.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from node.engine import SequenceRequest  # noqa: E402
from tests.bench.bench_decode import SMOLLM2  # noqa: E402

GROUP = 8
CALIBRATED_BY = 72  # traces: 1,024 tokens and 32 chunks, and some to spare; they are 17 tokens long on average


def draw(leases: list[Any], dtype: str, slots: int) -> list[Any]:
    """A trace for each slot of each lease, unsigned."""
    from node.vllm_engine import VllmEngine
    from protocol.trace import Span, SpanKind, Trace

    engine = VllmEngine(dtype=dtype, slots=slots, threads=1, settings={"max_model_len": 1024})
    engine.load(SMOLLM2, bytes(32))
    said = engine.descriptor()
    asked = {f"{at}/{slot.index}": (lease, slot) for at, lease in enumerate(leases) for slot in lease.slots}
    began = time.perf_counter()
    for key, (lease, slot) in asked.items():
        engine.open(SequenceRequest(key, lease.prompt, slot.seed, lease.temperature, lease.max_turn_tokens))
    traces = {}
    while len(traces) < len(asked):
        for turn in engine.step():
            lease, slot = asked[turn.key]
            traces[turn.key] = Trace(
                run=lease.run, lease_id=lease.lease_id, node=lease.node, policy_version=0,
                policy_root=lease.policy_root, slot=slot.index, tokens=turn.tokens,
                spans=(Span(int(SpanKind.GENERATED), len(turn.tokens)),), logprobs=turn.logprobs,
                proofs=engine.finish(turn.key), reward=0.0, engine=said, started_ms=1, finished_ms=2,
            )  # fmt: skip
    seconds, tokens = time.perf_counter() - began, sum(len(each.tokens) for each in traces.values())
    engine.close()
    print(
        f"vLLM {said.version} {said.dtype} {said.runner}: {len(traces)} traces, {tokens} tokens, "
        f"{tokens / seconds:.1f} a second"
    )
    return [traces[key] for key in asked]


def refusals(pairs: list[Any], ours: list[Any], limits: Any, calibration: Any, what: str) -> int:
    from protocol.verdict import CheckOutcome
    from verify.check import audit_checks

    found: Counter[str] = Counter()
    scores = None
    for (trace, lease), each in zip(pairs, ours, strict=True):
        audited = audit_checks(trace, lease, each, limits, calibration)
        failed = [check for check in audited.checks if check.outcome == CheckOutcome.FAILED]
        found.update(f"{check.name}: {check.detail}" for check in failed[:1])
        if audited.scores:
            scores = audited.scores if scores is None else tuple(map(sum, zip(scores, audited.scores, strict=True)))
    print(f"{what}: {sum(found.values())} of {len(pairs)} refused {dict(found) or ''}")
    print(f"  limits: {limits}")
    if scores is not None:
        from verify.scores import node_evidence

        print(f"  evidence of the node, all its traces together: {node_evidence((), scores):.2f} nats")
    return sum(found.values())


def statistics(ours: list[Any], pairs: list[Any]) -> None:
    import numpy as np

    margins = np.concatenate([each.margins for each in ours])
    logprobs = np.concatenate(
        [np.abs(np.asarray(trace.logprobs) - each.logprobs) for (trace, _), each in zip(pairs, ours, strict=True)]
    )
    chunks = [chunk for each in ours for chunk in each.chunks if chunk.length >= 8]
    other = np.count_nonzero(margins)
    print(
        f"{len(margins)} tokens: {other} another than the seed draws here ({other / len(margins):.2%}), largest margin "
        f"{margins.max():.3f}; logprobs off by at most {logprobs.max():.3f}, mean {logprobs.mean():.4f}"
    )
    for name in ("exponent_mismatches", "sign_mismatches", "mantissa_mean", "mantissa_median"):
        values = np.array([getattr(chunk, name) for chunk in chunks], dtype=float)
        print(f"  {len(chunks)} proofs, {name}: mean {values.mean():.2f}, worst {values.max():.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None or not SMOLLM2.is_dir():
        print("not measured: needs vLLM (make vllm-env) and SmolLM2 (scripts/convert-smollm2)")
        return 0
    return measure(options)


def measure(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from protocol.environments import base
    from verify.calibrate import calibrate, provisional
    from verify.judge import recompute
    from verify.prefill import Verifier
    from verify.reference import ReferenceRun
    from verify.thresholds import limits_for

    run, environment = ReferenceRun.found(SMOLLM2, "letters@1"), base.load("letters@1")
    count = -(-(options.traces + CALIBRATED_BY) // GROUP)
    leases = [
        replace(
            run.lease(task, environment, slots=GROUP), max_turn_tokens=options.tokens, max_tokens=2 * options.tokens
        )
        for task in range(count)
    ]
    traces = draw(leases, options.dtype, options.slots)
    pairs = [(trace, lease) for trace, lease in zip(traces, [each for each in leases for _ in each.slots], strict=True)]
    verifier = Verifier(SMOLLM2, options.dtype, threads=1)
    began = time.perf_counter()
    by, judged = pairs[:CALIBRATED_BY], pairs[CALIBRATED_BY : CALIBRATED_BY + options.traces]
    ours = recompute(verifier, judged)
    print(f"recomputed by transformers {options.dtype}: {time.perf_counter() - began:.0f} s")
    statistics(ours, judged)
    ceilings = limits_for(options.dtype, options.dtype)
    refused = refusals(judged, ours, ceilings, None, "by the ceilings")
    names: dict[str, Any] = {"worker_dtype": options.dtype, "environments": [("letters@1", "")], "created_ms": 0}
    own = calibrate(SMOLLM2, verifier, traces=8, tokens=options.tokens, **names)
    if options.dtype != "float32":
        borrowed = provisional(own)
        refused += refusals(judged, ours, borrowed.limits, borrowed, "by a provisional calibration")
    measured = calibrate(SMOLLM2, verifier, trusted=by, **names)
    refused += refusals(
        judged, ours, measured.limits, measured, f"by a calibration of {CALIBRATED_BY} traces of this pair"
    )
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
