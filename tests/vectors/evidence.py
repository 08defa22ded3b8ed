"""SPEC 8.11 and 8.12: calibrations, and the log of a run."""

from __future__ import annotations

from typing import Any

import wire
from example import CALIBRATION, LEASE, MANIFEST, NODE, RECEIPT, RUN, T0, TRAINER, VERDICT, merkle, sha256
from section import Section, invalid_objects


def calibration() -> dict[str, Any]:
    section = Section("8.11")
    section.object("Calibration", "calibration", "of two float32 engines", CALIBRATION)
    any_engine = CALIBRATION["pair"] | {
        "worker_engine": "", "worker_dtype": "bfloat16", "worker_device": "", "verifier_dtype": "bfloat16"
    }  # fmt: skip
    section.object("Calibration", "provisional", "of any bfloat16 engine", CALIBRATION | {"pair": any_engine})
    margins = CALIBRATION["margins"]
    first, second = margins["alternatives"]
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("no_alternative", "nothing to score against", {"margins": margins | {"alternatives": []}}),
        ("alternative_twice", "one name twice", {"margins": margins | {"alternatives": [first, first]}}),
        ("edges_fall", "edges out of order", {"margins": margins | {"edges": [0.02, 0.0, 0.5]}}),
        ("edges_equal", "a bin of nothing", {"margins": margins | {"edges": [0.0, 0.0, 0.5]}}),
        (
            "score_missing",
            "as many scores as edges",
            {"margins": margins | {"alternatives": [first, second | {"scores": [-0.75, 2.5, 4.5]}]}},
        ),
        (
            "scores_fall",
            "a larger margin that speaks for the node",
            {"margins": margins | {"alternatives": [first | {"scores": [0.5, -0.125, 1.0, 1.5]}]}},
        ),
        (
            "score_above_the_most",
            "one token that decides alone",
            {"margins": margins | {"alternatives": [first | {"scores": [0.0, 0.5, 1.0, 5.5]}]}},
        ),
        (
            "score_below_the_least",
            "one token that clears a node for good",
            {"margins": margins | {"alternatives": [first | {"scores": [-5.5, 0.5, 1.0, 1.5]}]}},
        ),
        ("limit_below_zero", "", {"limits": CALIBRATION["limits"] | {"mantissa_mean": -0.5}}),
    )
    for name, comment, change in cases:
        data = wire.encode("Calibration", CALIBRATION | change)
        section.bad("decode", name, comment, "MALFORMED", object="Calibration", bytes=data)
    section.object("ScoreTable", "table", "three edges, four bins", margins)
    many = [float(i) for i in range(128)]
    invalid_objects(
        section,
        "ScoreTable",
        margins,
        (("128_edges", "one too many", "TOO_LARGE", "edges", wire.array([wire.real(x) for x in many])),),
    )
    sealed = wire.encode("Signed", wire.seal(NODE, "Calibration", CALIBRATION))
    section.bad(
        "unseal",
        "sealed_by_a_node",
        "a node calibrates itself",
        "BAD_SIGNATURE",
        object="Calibration",
        bytes=sealed,
        signer=TRAINER.public,
    )
    return section.content()


def log() -> dict[str, Any]:
    section = Section("8.12")
    submission = {
        "receipt": wire.seal(TRAINER, "Receipt", RECEIPT),
        "draw": {"seen": 0, "floor": 0.05, "rate": 1.0, "drawn": True, "trusted": None},
    }
    verdict = {"sequence": 1, "verdict": wire.seal(TRAINER, "Verdict", VERDICT)}
    open_epoch = {
        "manifest": wire.seal(TRAINER, "Manifest", MANIFEST),
        "calibrations": [wire.seal(TRAINER, "Calibration", CALIBRATION)],
        "leases": [wire.seal(TRAINER, "Lease", LEASE)],
        "submissions": [submission],
        "verdicts": [verdict],
        "epoch": None,
    }
    items = (
        wire.encode("Signed", open_epoch["manifest"]),
        wire.encode("Signed", open_epoch["calibrations"][0]),
        wire.encode("Signed", open_epoch["leases"][0]),
        wire.encode("Submission", submission),
        wire.encode("LoggedVerdict", verdict),
    )
    root = merkle(list(items))
    epoch = {
        "run": RUN,
        "version": 0,
        "root": root,
        "calibrations": 1,
        "leases": 1,
        "submissions": 1,
        "verdicts": 1,
        "audit_value": sha256(b"s0"),
        "previous": bytes(32),
        "closed_ms": T0 + 90_000,
    }
    data = section.object("EpochLog", "open", "an epoch that may still change", open_epoch)
    section.good("epoch_root", "root", "over five items", bytes=data, value=root)
    section.object("EpochLog", "closed", "sealed", open_epoch | {"epoch": wire.seal(TRAINER, "Epoch", epoch)})
    section.object("Epoch", "epoch", "the seal", epoch)
    by_word = {"seen": 7, "floor": 0.05, "rate": 0.05, "drawn": False, "trusted": 3}
    section.object("Draw", "trusted", "of a node that the trainer trusts since verdict 3", by_word)
    section.object("Submission", "undrawn", "refused before the draw", submission | {"draw": None})
    invalid_objects(
        section,
        "Draw",
        submission["draw"],
        (("rate_infinite", "not finite", "MALFORMED", "rate", b"\xcb\x7f\xf0" + bytes(6)),),
    )
    invalid_objects(
        section,
        "EpochLog",
        open_epoch,
        (("manifest_nil", "an epoch of no policy", "MALFORMED", "manifest", wire.NIL),),
    )
    return section.content()
