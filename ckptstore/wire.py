"""Journal entries, parts and indexes as bytes, and back.

The only place that knows how nouns look on the store; a reader refuses what it does not know and
names what is wrong. Byte tables and a worked example: docs/reference/format-v1.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from ckptstore.errors import CkptStoreError, CorruptError, UnsupportedFormatError
from ckptstore.history import (
    AbandonEntry,
    Body,
    CommitEntry,
    Entry,
    FenceEntry,
    Fold,
    MarkEntry,
    Origin,
    PublishEntry,
    ReleaseEntry,
    RetireEntry,
    SummaryEntry,
)
from ckptstore.manifest import FORMAT, AttemptId, ObjectRef, Roster, named_key

# Kinds of format 1 that this version neither writes nor can fold: met, they are refused, never skipped (R7).
LATER_KINDS = ("compact", "pin", "unpin", "detach", "drained")


def digest_of(data: Any) -> str:
    """XXH3-128 of bytes, in hex. Not a defence against a malicious writer."""
    return xxhash.xxh3_128_hexdigest(data)


def canonical(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: one value, one text."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


def load_json(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} is not JSON ({error}): read another copy of it", what=what) from error
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not a JSON object: read another copy of it", what=what)
    return value


# -- small nouns


def ref_to_json(ref: ObjectRef) -> dict[str, Any]:
    value: dict[str, Any] = {"key": ref.key, "nbytes": ref.nbytes, "digest": ref.digest}
    if ref.tail is not None:
        value["tail"] = {"nbytes": ref.tail[0], "digest": ref.tail[1]}
    return value


def ref_from_json(value: Any) -> ObjectRef:
    """Raises KeyError, TypeError or ValueError for what is none."""
    tail = value.get("tail")
    return ObjectRef(
        key=named_key(value["key"]),
        nbytes=int(value["nbytes"]),
        digest=str(value["digest"]),
        tail=None if tail is None else (int(tail["nbytes"]), str(tail["digest"])),
    )


def roster_to_json(roster: Roster) -> list[list[Any]]:
    return [[role, size] for role, size in roster.roles]


def roster_from_json(value: Any) -> Roster:
    return Roster(roles=tuple((str(role), int(size)) for role, size in value))


def origin_to_json(origin: Origin) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": origin.kind}
    if origin.checkpoint is not None:
        out["checkpoint"] = str(origin.checkpoint)
    if origin.fence is not None:
        out["fence"] = origin.fence
    return out


def origin_from_json(value: Any) -> Origin:
    checkpoint = value.get("checkpoint")
    return Origin(
        kind=str(value["kind"]),
        checkpoint=AttemptId.parse(checkpoint) if checkpoint is not None else None,
        fence=value.get("fence"),
    )


def _publication_to_json(value: tuple[int, str | None] | None) -> dict[str, Any] | None:
    return None if value is None else {"number": value[0], "digest": value[1]}


def _publication_from_json(value: Any) -> tuple[int, str | None] | None:
    return None if value is None else (int(value["number"]), value["digest"])


# -- bodies


def _body_to_json(body: Body) -> dict[str, Any]:
    match body:
        case FenceEntry():
            return {
                "fence": body.fence,
                "replaces": body.replaces,
                "origin": origin_to_json(body.origin),
                "reason": body.reason,
                "roster": roster_to_json(body.roster),
                "job": body.job,
                "founding": dict(body.founding) if body.founding is not None else None,
            }
        case CommitEntry():
            return {
                "fence": body.fence,
                "id": str(body.id),
                "index": ref_to_json(body.index),
                "witnesses": {key: str(id) for key, id in body.witnesses.items()},
                "level": body.level,
                "step": body.step,
                "publication": _publication_to_json(body.publication),
                "counters": dict(body.counters),
            }
        case AbandonEntry():
            return {"fence": body.fence, "id": str(body.id), "reason": body.reason}
        case PublishEntry():
            return {
                "fence": body.fence,
                "number": body.number,
                "base": body.base,
                "index": ref_to_json(body.index),
                "digest": body.digest,
            }
        case MarkEntry():
            return {"id": str(body.id), "segments": list(body.segments), "reason": body.reason}
        case ReleaseEntry():
            return {"fence": body.fence}
        case RetireEntry():
            return {"ids": [str(id) for id in body.ids], "policy": body.policy}
        case SummaryEntry():
            return {"state": body.state}


_COUNTED = ("nbytes", "nbytes_written", "nbytes_reused", "nbytes_saved")


def _counters_from_json(value: Any) -> dict[str, Any]:
    """What a commit counted: whole numbers, and ranks by role. Others may come later."""
    told = dict(value)
    told |= {name: int(told[name]) for name in _COUNTED if name in told}
    if "roles" in told:
        told["roles"] = {str(role): int(size) for role, size in told["roles"].items()}
    return told


def _body_from_json(kind: str, value: Mapping[str, Any], what: str) -> Body:
    if kind == "fence":
        return FenceEntry(
            fence=int(value["fence"]),
            replaces=int(value["replaces"]),
            origin=origin_from_json(value["origin"]),
            reason=value["reason"],
            roster=roster_from_json(value["roster"]),
            job=str(value["job"]),
            founding=None if value["founding"] is None else dict(value["founding"]),
        )
    if kind == "commit":
        return CommitEntry(
            fence=int(value["fence"]),
            id=AttemptId.parse(value["id"]),
            index=ref_from_json(value["index"]),
            witnesses={str(key): AttemptId.parse(id) for key, id in value["witnesses"].items()},
            level=str(value["level"]),
            publication=_publication_from_json(value["publication"]),
            counters=_counters_from_json(value["counters"]),
        )
    if kind == "abandon":
        return AbandonEntry(
            fence=int(value["fence"]), id=AttemptId.parse(value["id"]), reason=str(value["reason"])
        )
    if kind == "publish":
        return PublishEntry(
            fence=int(value["fence"]),
            number=int(value["number"]),
            base=value["base"],
            index=ref_from_json(value["index"]),
            digest=str(value["digest"]),
        )
    if kind in ("bad", "good"):
        return MarkEntry(
            kind=kind,
            id=AttemptId.parse(value["id"]),
            segments=tuple(str(key) for key in value["segments"]),
            reason=str(value["reason"]),
        )
    if kind == "release":
        return ReleaseEntry(fence=int(value["fence"]))
    if kind == "retire":
        return RetireEntry(ids=tuple(AttemptId.parse(id) for id in value["ids"]), policy=str(value["policy"]))
    if kind == "summary":
        return SummaryEntry(state=value["state"])
    hint = "with an entry kind that comes later" if kind in LATER_KINDS else "by a newer format"
    raise UnsupportedFormatError(f"{what} has kind {kind!r}, written {hint}: upgrade ckptstore", kind=kind)


# -- entries


def encode_entry(entry: Entry) -> bytes:
    """The bytes of one slot; `check` is the digest of all others."""
    value = {
        "slot": entry.slot,
        "kind": entry.body.kind,
        "run": entry.run,
        "write": entry.write,
        "prev": entry.prev,
        "at": entry.at,
        "by": entry.by,
        **_body_to_json(entry.body),
    }
    return canonical({**value, "check": digest_of(canonical(value))})


def decode_entry(data: bytes, what: str) -> Entry:
    """Raises CorruptError when any byte differs from what was written, UnsupportedFormatError for unknown kinds."""
    value = load_json(data, what)
    check = value.pop("check", None)
    if check != digest_of(canonical(value)) or canonical({**value, "check": check}) != data:
        raise CorruptError(
            f"{what} fails its check ({check}): repair it from a copy before anything is written", what=what
        )
    try:
        return Entry(
            slot=int(value["slot"]),
            run=str(value["run"]),
            write=str(value["write"]),
            prev=str(value["prev"]),
            at=str(value["at"]),
            by=str(value["by"]),
            body=_body_from_json(str(value["kind"]), value, what),
        )
    except CkptStoreError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            f"{what} lacks a field or has a wrong one ({error!r}): repair it", what=what
        ) from error


# -- summaries


def fold_to_json(fold: Fold) -> dict[str, Any]:
    """A summary's state: everything of the fold, write ids left out (protocol R9)."""
    return {
        "slots": fold.slots,
        "fence": fold.fence,
        "fences": [[fold.fence_slot[f], _body_to_json(entry)] for f, entry in fold.fences.items()],
        "commits": [
            [fold.commit_slot[id], fold.committed_at[id], _body_to_json(entry)]
            for id, entry in fold.commits.items()
        ],
        "retired": sorted(str(id) for id in fold.retired),
        "bad": {str(id): reason for id, reason in fold.bad.items()},
        "rotten": sorted(fold.rotten),
        "abandoned": {str(id): reason for id, reason in fold.abandoned.items() if id.fence == fold.fence},
        "released": sorted(fold.released),
        "publications": [_body_to_json(entry) for entry in fold.publications],
    }


def fold_from_json(value: Mapping[str, Any], what: str) -> Fold:
    try:
        fold = Fold(slots=int(value["slots"]), fence=int(value["fence"]))
        for slot, body in value["fences"]:
            entry = _body_from_json("fence", body, what)
            if isinstance(entry, FenceEntry):
                fold.fences[entry.fence], fold.fence_slot[entry.fence] = entry, int(slot)
        for slot, at, body in value["commits"]:
            commit = _body_from_json("commit", body, what)
            if isinstance(commit, CommitEntry):
                fold.commits[commit.id], fold.commit_slot[commit.id] = commit, int(slot)
                fold.committed_at[commit.id] = str(at)
        for body in value["publications"]:
            publish = _body_from_json("publish", body, what)
            if isinstance(publish, PublishEntry):
                fold.publications.append(publish)
        fold.retired = {AttemptId.parse(id) for id in value["retired"]}
        fold.bad = {AttemptId.parse(id): str(reason) for id, reason in value["bad"].items()}
        fold.rotten = {str(key) for key in value["rotten"]}
        fold.abandoned = {AttemptId.parse(id): str(reason) for id, reason in value["abandoned"].items()}
        fold.released = {int(fence) for fence in value["released"]}
        for entry in fold.fences.values():
            fold.check_fence(entry)
        if fold.fence not in (fold.fences or {0}):
            raise ValueError(f"its newest fence {fold.fence} is not among its fences")
    except CkptStoreError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"{what} is not a summary ({error!r}): replay the journal", what=what) from error
    return fold


# -- run.json


def encode_run(run: str, created: str, write: str) -> bytes:
    return canonical({"format": FORMAT, "run": run, "created": created, "write": write})


def decode_run(data: bytes, what: str) -> dict[str, Any]:
    value = load_json(data, what)
    check_format(value.get("format"), what)
    if not isinstance(value.get("run"), str):
        raise CorruptError(f"{what} names no run: repair it from journal slot 0", what=what)
    return value


def check_format(number: Any, what: str) -> None:
    if not isinstance(number, int) or number < 1:
        raise CorruptError(
            f"{what} has no format number ({number!r}): it is damaged, or not ckptstore's", what=what
        )
    if number > FORMAT:
        raise UnsupportedFormatError(
            f"{what} has format {number}, this version reads up to {FORMAT}: upgrade ckptstore", format=number
        )
