"""Coverage-guided fuzzing of one target: `python -m tests.fuzz.guided TARGET [flags | FILE]`; `make fuzz` runs all.

Needs the extra `fuzz` (atheris). The flags are libFuzzer's; a FILE is run once, to see a failure again. The corpus
grows in .cache/fuzz/TARGET from the seeds; an input that fails is left there as crash-… with its traceback on the
terminal, a hang as timeout-…, growth as oom-….
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["protocol", "verify"]):
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import TARGETS

CACHE = Path(__file__).parent.parent.parent / ".cache" / "fuzz"
# An input takes milliseconds and the whole process some hundred MiB: more of either is a fault.
BOUNDS = ("-timeout=10", "-rss_limit_mb=768")
# Decoding is driven by tables, so one line covers many objects: coverage alone would drop most seeds.
GUIDANCE = ("-keep_seed=1", "-use_value_profile=1")
MEMORY_DISK = Path("/dev/shm")


def main(target: str, flags: list[str]) -> None:
    corpus = CACHE / target / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds(target)):
        (corpus / f"seed-{number:04}").write_bytes(seed)
    run = TARGETS[target]
    with tempfile.TemporaryDirectory(dir=MEMORY_DISK if MEMORY_DISK.is_dir() else None) as scratch:
        folder = Path(scratch)
        inputs = [] if any(not flag.startswith("-") for flag in flags) else [str(corpus)]
        arguments = [sys.argv[0], *BOUNDS, *GUIDANCE, f"-artifact_prefix={CACHE / target}/", *flags, *inputs]
        atheris.Setup(arguments, lambda data: run(data, folder))
        atheris.Fuzz()


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TARGETS:
        sys.exit(f"usage: python -m tests.fuzz.guided {{{','.join(TARGETS)}}} [libFuzzer flags | FILE]")
    main(sys.argv[1], sys.argv[2:])
