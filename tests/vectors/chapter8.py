"""SPEC 8: the objects, each with its validity steps."""

from __future__ import annotations

import json
from typing import Any

import wire
from example import (
    CALIBRATION,
    CONFIG,
    DELTA,
    EMBEDDING,
    ENGINE,
    GENESIS,
    LEASE,
    MANIFEST,
    MEMBERSHIP,
    NODE,
    NORM,
    POLICY_FILES,
    POLICY_LEAVES,
    RECEIPT,
    ROOT,
    RUN,
    STRANGER,
    TOKENIZER,
    TRACE,
    TRAINER,
    VERDICT,
    file_leaf,
    merkle,
    safetensors,
    seed_input,
    sha256,
    slot_seed,
    with_header,
)
from section import Section, invalid_objects, plus, swapped, unknown_field, with_raw


def genesis() -> dict[str, Any]:
    section = Section("8.1")
    payload = section.object("Genesis", "genesis", "the example run", GENESIS)
    share = GENESIS["environments"][0]
    two = GENESIS | {"environments": [share, {"name": "guess@1", "parameters": "", "weight": 1_000_000}]}
    section.object("Genesis", "genesis_two_environments", "two environments, the second a million times as often", two)
    section.good("run_id", "run_id", "SHA-256 of the payload", bytes=payload, value=RUN)
    sealed = wire.seal(TRAINER, "Genesis", GENESIS)
    section.good(
        "open_genesis",
        "opened",
        "run and trainer as a node was told",
        bytes=wire.encode("Signed", sealed),
        run=RUN,
        trainer=TRAINER.public,
        value=GENESIS,
    )
    by_stranger = wire.seal(STRANGER, "Genesis", GENESIS)
    other = wire.seal(TRAINER, "Genesis", GENESIS | {"name": "other"})
    flipped = sealed | {"signature": bytes(64)}
    for name, comment, error, signed, trainer in (
        ("opened_other_run", "another genesis of the same trainer", "WRONG_RUN", other, TRAINER.public),
        ("opened_bad_signature", "the right payload, unsigned", "BAD_SIGNATURE", flipped, TRAINER.public),
        ("opened_other_trainer", "signed by somebody else than was told", "BAD_SIGNATURE", by_stranger, TRAINER.public),
        ("opened_names_another", "signed well, but it names another trainer", "MALFORMED", by_stranger, None),
    ):
        section.bad("open_genesis", name, comment, error, bytes=wire.encode("Signed", signed), run=RUN, trainer=trainer)
    invalid_objects(
        section,
        "Genesis",
        GENESIS,
        (
            ("no_environment", "nothing to do", "MALFORMED", "environments", wire.array([])),
            (
                "environment_twice",
                "the same tasks listed twice",
                "MALFORMED",
                "environments",
                wire.array([wire.encode("EnvironmentShare", share)] * 2),
            ),
            (
                "weight_zero",
                "an environment that never comes",
                "MALFORMED",
                "environments",
                wire.array([wire.encode("EnvironmentShare", share | {"weight": 0})]),
            ),
            (
                "weight_over",
                "over a million",
                "MALFORMED",
                "environments",
                wire.array([wire.encode("EnvironmentShare", share | {"weight": 1_000_001})]),
            ),
            (
                "environment_unnamed",
                "an empty name",
                "MALFORMED",
                "environments",
                wire.array([wire.encode("EnvironmentShare", share | {"name": ""})]),
            ),
            (
                "65_environments",
                "one too many",
                "TOO_LARGE",
                "environments",
                wire.array([wire.encode("EnvironmentShare", share)] * 65),
            ),
            ("long_name", "257 characters", "MALFORMED", "name", wire.text("n" * 257)),
            ("short_trainer", "31 bytes", "MALFORMED", "trainer", wire.blob(bytes(31))),
            ("short_root", "31 bytes", "MALFORMED", "first_policy_root", wire.blob(bytes(31))),
            ("short_anchor", "31 bytes", "MALFORMED", "audit_anchor", wire.blob(bytes(31))),
        ),
    )
    return section.content()


def address() -> dict[str, Any]:
    section = Section("8.2")
    peer, run = wire.peer_id(TRAINER.public), RUN.hex()
    for name, multiaddr in (
        ("ip4", "/ip4/203.0.113.7/tcp/4001"),
        ("ip6", "/ip6/2001:db8::7/tcp/4001"),
        ("dns", "/dns4/trainer.example/tcp/4001"),
    ):
        section.good(
            "address",
            name,
            "transport, peer id, run",
            text=f"{multiaddr}/p2p/{peer}/run/{run}",
            value={"multiaddr": multiaddr, "trainer": TRAINER.public, "run": RUN},
        )
    start = "/ip4/203.0.113.7/tcp/4001"
    for name, comment, text in (
        ("empty", "no text", ""),
        ("no_run", "the run is missing", f"{start}/p2p/{peer}"),
        ("no_peer", "the peer id is missing", f"{start}/run/{run}"),
        ("no_transport", "where to dial is missing", f"/p2p/{peer}/run/{run}"),
        ("relative", "does not begin with a slash", f"ip4/203.0.113.7/tcp/4001/p2p/{peer}/run/{run}"),
        ("short_run", "62 hex digits", f"{start}/p2p/{peer}/run/{run[:-2]}"),
        ("run_with_blanks", "64 digits with blanks between", f"{start}/p2p/{peer}/run/{run[:32]} {run[32:]}"),
        ("run_not_hex", "a letter beyond f", f"{start}/p2p/{peer}/run/{run[:-1]}g"),
        (
            "hashed_peer",
            "a peer id that holds no key",
            f"{start}/p2p/{wire.base58(bytes([18, 32]) + bytes(32))}/run/{run}",
        ),
    ):
        section.bad("address", name, comment, "USAGE", text=text)
    return section.content()


def policy() -> dict[str, Any]:
    section = Section("8.3")
    for leaf, (name, kind) in zip(
        POLICY_LEAVES,
        (("embed", "TensorLeaf"), ("norm", "TensorLeaf"), ("config", "FileLeaf"), ("tokenizer", "FileLeaf")),
        strict=True,
    ):
        value = _leaf_value(name)
        section.good("decode", f"leaf_{name}", "a leaf of the example policy", object=kind, bytes=leaf, value=value)
    for count in (1, 2, 3, 5, 8):
        leaves = [bytes([i]) for i in range(count)]
        section.good("merkle_root", f"tree_{count}", "a root over one-byte leaves", leaves=leaves, value=merkle(leaves))
    section.good("policy_root", "policy", "two tensors, two files", files=POLICY_FILES, value=ROOT)
    sharded = {
        "config.json": CONFIG,
        "model-00001-of-00002.safetensors": safetensors({"norm.weight": NORM}),
        "model-00002-of-00002.safetensors": safetensors({"embed.weight": EMBEDDING}),
        "tokenizer.json": TOKENIZER,
    }
    section.good(
        "policy_root", "policy_sharded", "the same tensors in two files: the same root", files=sharded, value=ROOT
    )
    ignored = POLICY_FILES | {"README.md": b"hello\n", "notes.pdf": b"%PDF"}
    section.good("policy_root", "policy_ignored_files", "files that are no part of a policy", files=ignored, value=ROOT)
    changed = POLICY_FILES | {"config.json": CONFIG + b"\n"}
    other = merkle([*POLICY_LEAVES[:2], file_leaf("config.json", CONFIG + b"\n"), POLICY_LEAVES[3]])
    section.good(
        "policy_root",
        "policy_config_changed",
        "one byte more of configuration: another root",
        files=changed,
        value=other,
    )
    _bad_policies(section)
    _manifests(section)
    return section.content()


def _leaf_value(name: str) -> dict[str, Any]:
    if name in ("embed", "norm"):
        dtype, shape, raw = EMBEDDING if name == "embed" else NORM
        return {"name": f"{name}.weight", "dtype": dtype, "shape": shape, "digest": sha256(raw)}
    return {"name": f"{name}.json", "digest": sha256(POLICY_FILES[f"{name}.json"])}


def _bad_policies(section: Section) -> None:
    def entry(begin: Any, end: Any, shape: Any = None, dtype: Any = "BF16") -> dict[str, Any]:
        return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [begin, end]}

    def model(table: dict[str, Any], size: int = 8) -> bytes:
        return with_header(json.dumps(table, separators=(",", ":")).encode(), bytes(size))

    good = POLICY_FILES["model.safetensors"]
    twice = (
        b'{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"a":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}'
    )
    for name, comment, content in (
        ("tensors_overlap", "two tensors share bytes", model({"a": entry(0, 6), "b": entry(4, 8)})),
        ("tensors_gap", "bytes that belong to no tensor", model({"a": entry(0, 3), "b": entry(4, 8)})),
        ("tensors_tail", "bytes after the last tensor", model({"a": entry(0, 4)})),
        ("tensors_backwards", "a tensor that ends before it begins", model({"a": entry(4, 0), "b": entry(0, 8)})),
        ("tensors_cut_off", "the last tensor is not all there", good[:-1]),
        ("header_cut_off", "the file ends within its header", good[:20]),
        ("header_too_long", "a header length of 2^63", (1 << 63).to_bytes(8, "little") + good[8:]),
        ("header_missing", "fewer than 8 bytes", good[:4]),
        ("header_not_json", "a header of blanks", with_header(b"    ", b"")),
        ("header_a_list", "a list, not a table", with_header(b"[]", b"")),
        ("header_name_twice", "a tensor named twice", with_header(twice, bytes(8))),
        ("header_text_offset", "an offset as text", model({"a": entry("0", 8)})),
        ("header_real_offset", "an offset as 0.0", model({"a": entry(0.0, 8)})),
        ("header_negative_shape", "a dimension below 0", model({"a": entry(0, 8, [-4])})),
        ("header_no_shape", "a tensor without shape", model({"a": {"dtype": "BF16", "data_offsets": [0, 8]}})),
        ("header_type_number", "a type that is no text", model({"a": entry(0, 8, dtype=16)})),
        ("header_surrogate", "a name that has no UTF-8 form", model({"\ud800": entry(0, 8)})),
    ):
        section.bad("policy_root", name, comment, "POLICY", files=POLICY_FILES | {"model.safetensors": content})
    weights = {name: content for name, content in POLICY_FILES.items() if name != "model.safetensors"}
    pickled = weights | {"pytorch_model.bin": b"\x80\x04."}
    for name, comment, files in (
        ("folder_pickle", "pickled weights, which run code when loaded", pickled),
        ("folder_no_weights", "no safetensors", weights),
        ("folder_no_config", "no config.json", {k: v for k, v in POLICY_FILES.items() if k != "config.json"}),
        ("folder_no_tokenizer", "no tokenizer.json", {k: v for k, v in POLICY_FILES.items() if k != "tokenizer.json"}),
        (
            "folder_tensor_twice",
            "a tensor in two files",
            POLICY_FILES | {"extra.safetensors": safetensors({"norm.weight": NORM})},
        ),
    ):
        section.bad("policy_root", name, comment, "POLICY", files=files)


def _manifests(section: Section) -> None:
    section.object("Manifest", "manifest", "the example policy", MANIFEST)
    four_mib = 4 * 1024 * 1024
    blob = {"digest": sha256(b"blob"), "length": four_mib}
    large = [{"name": "model.safetensors", "blobs": [blob, blob, blob | {"length": 1}]}]
    section.object("Manifest", "manifest_three_blobs", "full blobs and a rest", MANIFEST | {"files": large})
    empty = [{"name": "merges.txt", "blobs": []}]
    section.object("Manifest", "manifest_empty_file", "a file without bytes", MANIFEST | {"files": empty})
    _deltas(section, blob)

    def files(*items: tuple[str, list[dict[str, Any]]]) -> bytes:
        return wire.array([wire.encode("PolicyFile", {"name": name, "blobs": blobs}) for name, blobs in items])

    one = [{"digest": sha256(b"x"), "length": 1}]
    cases = [
        ("files_unsorted", "names out of order", "MALFORMED", files(("b.json", one), ("a.json", one))),
        ("files_twice", "a name twice", "MALFORMED", files(("a.json", one), ("a.json", one))),
        ("blob_early_short", "a short blob that is not the last", "MALFORMED", files(("a.json", [*one, *one]))),
        ("blob_empty", "a blob of no bytes", "MALFORMED", files(("a.json", [one[0] | {"length": 0}]))),
        ("blob_large", "a blob over 4 MiB", "MALFORMED", files(("a.json", [one[0] | {"length": four_mib + 1}]))),
        ("257_files", "one file too many", "TOO_LARGE", files(*((f"f{i:03}.json", one) for i in range(257)))),
        (
            "blobs_announced", "a list of 2^32 - 1 blobs of which none comes", "TOO_LARGE",
            wire.array([wire.mapping([("name", wire.text("a.json")), ("blobs", b"\xdd" + b"\xff" * 4)])]),
        ),
    ]  # fmt: skip
    for name, text in (
        ("name_parent", "../a.json"),
        ("name_absolute", "/a.json"),
        ("name_folder", "a/b.json"),
        ("name_backslash", "a\\b.json"),
        ("name_hidden", ".a.json"),
        ("name_dash", "-a.json"),
        ("name_nul", "a\0.json"),
        ("name_newline", "a.json\n"),
        ("name_not_ascii", "é.json"),
        ("name_empty", ""),
        ("name_pickle", "model.bin"),
        ("name_code", "modeling.py"),
        ("name_suffix_alone", ".json"),
    ):
        cases.append((name, f"the file name {text!r}", "MALFORMED", files((text, one))))
    unknown_field(section, "Manifest", MANIFEST)
    for name, comment, error, raw in cases:
        section.bad(
            "decode", name, comment, error, object="Manifest", bytes=with_raw("Manifest", MANIFEST, "files", raw)
        )


def _deltas(section: Section, blob: dict[str, Any]) -> None:
    """Manifests that name deltas. blob: one of 4 MiB."""
    seventh = MANIFEST | {"version": 7}
    earlier = DELTA | {"base_version": 3, "blobs": [blob, blob | {"length": 1}]}
    section.object("Manifest", "manifest_one_delta", "a step from the version before", seventh | {"deltas": [DELTA]})
    section.object("Manifest", "manifest_two_deltas", "by base version", seventh | {"deltas": [earlier, DELTA]})
    other = DELTA | {"codec": "Z"}
    section.object(
        "Manifest", "delta_other_codec", "valid; whoever does not know the codec passes it over",
        seventh | {"deltas": [DELTA, other]},
    )  # fmt: skip
    short = blob | {"length": 1}
    many = [DELTA | {"base_version": version} for version in range(17)]
    for name, comment, error, deltas in (
        ("deltas_unsorted", "bases out of order", "MALFORMED", [DELTA, earlier]),
        ("deltas_twice", "a base twice", "MALFORMED", [DELTA, DELTA]),
        ("delta_from_itself", "a base that is not earlier", "MALFORMED", [DELTA | {"base_version": 7}]),
        ("delta_from_later", "a base that is later", "MALFORMED", [DELTA | {"base_version": 8}]),
        ("delta_without_blobs", "a delta of no bytes", "MALFORMED", [DELTA | {"blobs": []}]),
        ("delta_blob_empty", "a blob of no bytes", "MALFORMED", [DELTA | {"blobs": [blob | {"length": 0}]}]),
        ("delta_blob_early_short", "a short blob before the last", "MALFORMED", [DELTA | {"blobs": [short, blob]}]),
        ("17_deltas", "one delta too many", "TOO_LARGE", many),
    ):  # fmt: skip
        raw = wire.array([wire.encode("Delta", each) for each in deltas])
        manifest = MANIFEST | {"version": 20 if deltas is many else 7}
        section.bad(
            "decode", name, comment, error, object="Manifest", bytes=with_raw("Manifest", manifest, "deltas", raw)
        )


def lease() -> dict[str, Any]:
    section = Section("8.4")
    section.object("Lease", "lease", "two slots of a group of eight", LEASE)
    whole = LEASE | {"slots": [{"index": i, "seed": i} for i in range(64)], "group_size": 64}
    section.object("Lease", "lease_64_slots", "a whole group", whole)
    section.object("Lease", "lease_cold", "a temperature other than 1", LEASE | {"temperature": 0.7})

    def slots(*indices: int) -> bytes:
        return wire.array([wire.encode("Slot", {"index": i, "seed": i}) for i in indices])

    zero, minus = wire.uint(0), wire.real(-1.0)
    invalid_objects(
        section,
        "Lease",
        LEASE,
        (
            ("no_slot", "nothing to draw", "MALFORMED", "slots", slots()),
            ("slots_unsorted", "indices must ascend", "MALFORMED", "slots", slots(3, 0)),
            ("slot_twice", "an index twice", "MALFORMED", "slots", slots(3, 3)),
            ("slot_outside_group", "index 8 of a group of 8", "MALFORMED", "slots", slots(0, 8)),
            ("65_slots", "one too many", "TOO_LARGE", "slots", slots(*range(65))),
            ("group_size_over", "1,025", "MALFORMED", "group_size", wire.uint(1025)),
            ("no_environment_name", "an empty name", "MALFORMED", "environment", wire.text("")),
            ("empty_prompt", "no token to start from", "MALFORMED", "prompt", wire.blob(b"")),
            ("temperature_zero", "greedy is not a temperature", "MALFORMED", "temperature", wire.real(0.0)),
            ("temperature_negative", "below 0", "MALFORMED", "temperature", minus),
            ("temperature_integer", "an integer", "MALFORMED", "temperature", wire.uint(1)),
            ("no_turn_tokens", "turns of no token", "MALFORMED", "max_turn_tokens", zero),
            ("no_tokens", "no token at all", "MALFORMED", "max_tokens", zero),
            ("tokens_over", "over 131,072", "MALFORMED", "max_tokens", wire.uint(131_073)),
            (
                "ends_before_it_begins",
                "deadline at the time of issue",
                "MALFORMED",
                "deadline_ms",
                wire.uint(LEASE["issued_ms"]),
            ),
            (
                "seed_over",
                "a seed of more than 64 bits has no form: a real",
                "MALFORMED",
                "slots",
                wire.array([wire.mapping([("index", zero), ("seed", wire.real(2.0**64))])]),
            ),
        ),
    )
    sealed = wire.seal(TRAINER, "Lease", LEASE)
    section.good(
        "unseal",
        "sealed",
        "signed by the trainer",
        object="Lease",
        bytes=wire.encode("Signed", sealed),
        signer=TRAINER.public,
        value=LEASE,
    )
    own = wire.encode("Signed", wire.seal(NODE, "Lease", LEASE))
    section.bad(
        "unseal",
        "sealed_by_its_node",
        "a node writes its own lease",
        "BAD_SIGNATURE",
        object="Lease",
        bytes=own,
        signer=TRAINER.public,
    )
    return section.content()


def seed() -> dict[str, Any]:
    section = Section("8.5")
    for slot in (0, 3):
        value = seed_input(slot)
        data = section.object("SeedInput", f"seed_input_{slot}", "what slot and seed are bound by", value)
        section.good(
            "slot_seed",
            f"seed_{slot}",
            "BLAKE2b-512 with person rlcommons-seed-1, first 8 bytes",
            bytes=data,
            value=slot_seed(slot),
        )
    unknown_field(section, "SeedInput", seed_input(0))
    return section.content()


def trace() -> dict[str, Any]:
    section = Section("8.6")
    section.object("Trace", "trace", "two turns with an observation between", TRACE)
    one_turn = TRACE | {"tokens": [2], "spans": [{"kind": 0, "length": 1}], "logprobs": [-0.5]}
    section.object("Trace", "trace_one_token", "the shortest", one_turn)
    section.object(
        "Trace",
        "trace_largest_id",
        "ids are 32 bits wide; the vocabulary is verification's",
        one_turn | {"tokens": [2**32 - 1]},
    )
    spans = wire.encode("Span", {"kind": 0, "length": 1})
    invalid_objects(
        section,
        "Trace",
        TRACE,
        (
            (
                "span_kind",
                "a third kind of span",
                "MALFORMED",
                "spans",
                wire.array([wire.mapping([("kind", b"\2"), ("length", b"\1")])]),
            ),
            (
                "513_spans",
                "within the longest list of a trace, over this one's",
                "TOO_LARGE",
                "spans",
                wire.array([spans] * 513),
            ),
            ("4097_proofs", "one too many", "TOO_LARGE", "proofs", wire.array([wire.blob(b"")] * 4097)),
            ("proof_long", "259 bytes", "MALFORMED", "proofs", wire.array([wire.blob(bytes(259))])),
            ("proof_text", "text", "MALFORMED", "proofs", wire.array([wire.text("proof")])),
            ("slot_over", "1,024", "MALFORMED", "slot", wire.uint(1024)),
            ("reward_nan", "not a number", "MALFORMED", "reward", b"\xcb\x7f\xf8" + bytes(6)),
            ("reward_integer", "1 for 1.0", "MALFORMED", "reward", wire.uint(1)),
            ("lease_id_short", "15 bytes", "MALFORMED", "lease_id", wire.blob(bytes(15))),
            ("engine_nil", "nil", "MALFORMED", "engine", wire.NIL),
            (
                "engine_unknown_key",
                "inside a nested object",
                "MALFORMED",
                "engine",
                plus("EngineDescriptor", ENGINE, "zz", wire.NIL),
            ),
            (
                "engine_swapped",
                "inside a nested object",
                "NOT_CANONICAL",
                "engine",
                swapped("EngineDescriptor", ENGINE),
            ),
            (
                "engine_long_type",
                "17 characters",
                "MALFORMED",
                "engine",
                with_raw("EngineDescriptor", ENGINE, "dtype", wire.text("f" * 17)),
            ),
        ),
    )
    return section.content()


def receipt() -> dict[str, Any]:
    section = Section("8.7")
    section.object("Receipt", "receipt", "the trainer has the trace", RECEIPT)
    sealed = wire.encode("Signed", wire.seal(TRAINER, "Receipt", RECEIPT))
    section.good(
        "unseal",
        "sealed",
        "signed by the trainer",
        object="Receipt",
        bytes=sealed,
        signer=TRAINER.public,
        value=RECEIPT,
    )
    as_verdict = wire.encode("Signed", wire.seal(TRAINER, "Receipt", RECEIPT, wire.DOMAINS["Verdict"]))
    section.bad(
        "unseal",
        "sealed_as_verdict",
        "signed in the verdicts' domain",
        "BAD_SIGNATURE",
        object="Receipt",
        bytes=as_verdict,
        signer=TRAINER.public,
    )
    invalid_objects(
        section,
        "Receipt",
        RECEIPT,
        (
            ("digest_short", "31 bytes", "MALFORMED", "trace_digest", wire.blob(bytes(31))),
            ("sequence_negative", "-1", "MALFORMED", "sequence", b"\xff"),
        ),
    )
    return section.content()


def membership() -> dict[str, Any]:
    section = Section("8.13")
    section.object("Membership", "membership", "a week, for the example node", MEMBERSHIP)
    sealed = wire.encode("Signed", wire.seal(TRAINER, "Membership", MEMBERSHIP))
    told = {"run": RUN, "trainer": TRAINER.public, "node": NODE.public, "now_ms": MEMBERSHIP["expires_ms"] - 1}
    section.good("membership", "shown", "in its last millisecond", bytes=sealed, value=MEMBERSHIP, **told)
    by_itself = wire.encode("Signed", wire.seal(NODE, "Membership", MEMBERSHIP))
    for name, comment, code, raw, changes in (
        ("by_itself", "a node that admits itself", "BAD_SIGNATURE", by_itself, {}),
        ("other_run", "of another run than the one asked about", "WRONG_RUN", sealed, {"run": bytes(32)}),
        ("borrowed", "shown by somebody else", "BAD_SIGNATURE", sealed, {"node": STRANGER.public}),
        ("expired", "its time is over", "NOT_FOUND", sealed, {"now_ms": MEMBERSHIP["expires_ms"]}),
    ):
        section.bad("membership", name, comment, code, bytes=raw, **{**told, **changes})
    invalid_objects(
        section,
        "Membership",
        MEMBERSHIP,
        (("node_short", "31 bytes", "MALFORMED", "node", wire.blob(bytes(31))),),
    )
    return section.content()


def verdict() -> dict[str, Any]:
    section = Section("8.8")
    section.object("Verdict", "accepted", "audited and accepted", VERDICT)
    check = VERDICT["checks"][0]
    failed = check | {"outcome": "FAILED", "reason": "MARGIN", "value": 3.5, "start": 2, "end": 3}
    refused = VERDICT | {"outcome": "REFUSED", "reason": "MARGIN", "reward": None, "checks": [failed]}
    section.object("Verdict", "refused", "one check failed, at one token", refused)
    ours = VERDICT | {"outcome": "NOT_JUDGED", "reason": "VERIFIER_FAULT", "audited": False, "checks": []}
    section.object("Verdict", "not_judged", "a fault of the verifier's", ours)
    told = failed | {"name": "proof score", "reason": "PAIR_EVIDENCE", "value": 14.5, "limit": 13.815510557964274}
    provisional = {"calibration": bytes(32), "scores": [14.5], "checks": [told]}
    pair = {"outcome": "NOT_JUDGED", "reason": "PAIR_EVIDENCE", "reward": None}
    section.object("Verdict", "not_judged_pair", "scores of an unmeasured pair", VERDICT | pair | provisional)
    many = [check | {"name": f"check {i}"} for i in range(64)]
    section.object("Verdict", "64_checks", "as many as there may be", VERDICT | {"checks": many})

    def whole(name: str, comment: str, value: dict[str, Any]) -> None:
        section.bad("decode", name, comment, "MALFORMED", object="Verdict", bytes=wire.encode("Verdict", value))

    whole("accepted_with_reason", "a reason to accept", VERDICT | {"reason": "MARGIN"})
    whole("refused_without_reason", "no reason to refuse", VERDICT | {"outcome": "REFUSED"})
    whole(
        "refused_for_our_fault",
        "the verifier's fault counted against the node",
        VERDICT | {"outcome": "REFUSED", "reason": "VERIFIER_FAULT"},
    )
    whole(
        "not_judged_for_theirs", "the node's fault not judged", VERDICT | {"outcome": "NOT_JUDGED", "reason": "MARGIN"}
    )
    whole("scores_of_no_calibration", "scores, and nothing they were read from", VERDICT | {"scores": [0.5]})
    whole(
        "scores_without_audit",
        "scores of a trace nobody recomputed",
        VERDICT | {"calibration": bytes(32), "scores": [0.5], "audited": False},
    )
    whole(
        "check_failed_without_reason",
        "a check that fails for no reason",
        VERDICT | {"checks": [failed | {"reason": None}]},
    )
    whole(
        "check_passed_with_reason",
        "a check that passes and gives a reason",
        VERDICT | {"checks": [check | {"reason": "MARGIN"}]},
    )
    invalid_objects(
        section,
        "Verdict",
        VERDICT,
        (
            ("reason_unknown", "a word that is not in the list", "MALFORMED", "reason", wire.text("DISLIKED")),
            ("outcome_unknown", "a word that is not in the list", "MALFORMED", "outcome", wire.text("MAYBE")),
            ("65_checks", "one too many", "TOO_LARGE", "checks", wire.array([wire.encode("Check", check)] * 65)),
            ("reward_infinite", "not finite", "MALFORMED", "reward", b"\xcb\x7f\xf0" + bytes(6)),
        ),
    )
    own = wire.encode("Signed", wire.seal(NODE, "Verdict", VERDICT))
    section.bad(
        "unseal",
        "sealed_by_its_node",
        "a node acquits itself",
        "BAD_SIGNATURE",
        object="Verdict",
        bytes=own,
        signer=TRAINER.public,
    )
    return section.content()


def trace_file() -> dict[str, Any]:
    section = Section("8.9")
    full = {
        "genesis": wire.seal(TRAINER, "Genesis", GENESIS),
        "lease": wire.seal(TRAINER, "Lease", LEASE),
        "trace": wire.seal(NODE, "Trace", TRACE),
        "receipt": wire.seal(TRAINER, "Receipt", RECEIPT),
        "verdict": wire.seal(
            TRAINER, "Verdict", VERDICT | {"calibration": sha256(wire.encode("Calibration", CALIBRATION))}
        ),
        "calibration": wire.seal(TRAINER, "Calibration", CALIBRATION),
    }
    section.object("TraceFile", "full", "everything the trainer signed about a trace", full)
    section.object(
        "TraceFile",
        "unjudged",
        "before receipt and verdict",
        full | {"receipt": None, "verdict": None, "calibration": None},
    )
    invalid_objects(
        section,
        "TraceFile",
        full,
        (
            ("trace_nil", "a trace is required", "MALFORMED", "trace", wire.NIL),
            (
                "trace_unsealed",
                "the trace itself: its lists are longer than any in a trace file, which has none",
                "TOO_LARGE",
                "trace",
                wire.encode("Trace", TRACE),
            ),
            (
                "receipt_bytes",
                "the envelope as bytes",
                "MALFORMED",
                "receipt",
                wire.blob(wire.encode("Signed", full["receipt"])),
            ),
        ),
    )
    return section.content()
