"""Whatever the numbers of a recording say, every reader gives an answer or one line that names line and field."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import SetupError
from engine import events as ev
from kvtop.picture.shot import picture
from kvtop.record.door import MOST_BLOCKS
from kvtop.record.recording import read
from kvtop.record.verify import verify
from kvtop.sources import RecordingSource
from kvtop.state.dashboard import DashboardState
from tests.kvtop.streams import every_event

HEADER = b'{"kvtop":"0","schema":1}\n'
STARTED = {
    "type": "EngineStarted",
    "schema": 1,
    "source": "live",
    "capabilities": ["blocks"],
    "model": "m",
    "device": "cpu",
    "dtype": "f",
    "num_blocks": 9,
    "block_size": 4,
    "bytes_per_block": 1,
    "weights_bytes": 0,
    "hash_seed": 1,
    "epoch": 0.0,
    "max_model_len": 32,
    "knobs": {},
}
QUEUED = {"type": "RequestQueued", "request_id": 1, "prompt_token_ids": [1], "t_arrival": 0.0}
ADMITTED = {"type": "RequestAdmitted", "request_id": 1, "seq_id": 0, "cached_tokens": 0}
SAMPLED: dict[str, Any] = {
    "type": "TokensSampled",
    "seq_ids": [0],
    "token_ids": [5],
    "counts": [1],
    "num_computed": [1],
    "text": [""],
}
SNAPSHOT: dict[str, Any] = {
    "type": "PoolSnapshot",
    "refs": [],
    "queue": [1, 8],
    "hashed_ids": [],
    "hashes": [],
    "seq_ids": [],
    "tables": [],
    "computed": [],
}
HASH = "0" * 32


def written(path: Path, *batches: list[dict[str, Any]], t: Any = 0.1) -> Path:
    """A recording whose first batch is STARTED alone."""
    lines, first = [HEADER], 0
    for seq, events in enumerate([[STARTED], *batches]):
        line = {"seq": seq, "t": t if seq else 0.0, "step": 0, "first_event": first, "events": events}
        lines.append(json.dumps(line).encode() + b"\n")
        first += len(events)
    path.write_bytes(b"".join(lines))
    return path


def replay(path: Path) -> None:
    """As `replay --json` and `explain --json`."""
    state = DashboardState()
    for batch in read(path):
        state.apply(batch)
    json.dumps(state.summary())
    for view in state.requests.values():
        if view.explanation is not None:
            view.explanation.row(view.request_id)


def play(path: Path) -> None:
    """As the dashboard's `replay`, at full speed."""
    state = DashboardState()
    source = RecordingSource(path)
    source.attach(state)
    source.seek(1e300, wait=True)


READERS: tuple[Callable[[Path], Any], ...] = (
    replay,
    play,
    lambda path: picture(path, format="txt", view="all"),
)


def refusal(reader: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(SetupError) as info:
        reader(path)
    text = str(info.value)
    assert len(text) <= 200
    assert "\n" not in text
    return text


CLAIMS: list[tuple[list[dict[str, Any]], str]] = [
    ([QUEUED, ADMITTED | {"cached_tokens": 10**18}], "RequestAdmitted.cached_tokens"),
    (
        [QUEUED, ADMITTED | {"cached_tokens": 37}],
        "RequestAdmitted.cached_tokens is 37, the pool holds 36 tokens",
    ),
    (
        [QUEUED, ADMITTED, SAMPLED | {"num_computed": []}],
        "TokensSampled.num_computed has 0 rows, seq_ids has 1",
    ),
    ([QUEUED, ADMITTED, SAMPLED | {"counts": [10**8]}], "TokensSampled.counts say 100,000,000 tokens"),
    ([SAMPLED | {"counts": [10**8], "token_ids": []}], "TokensSampled.counts say 100,000,000 tokens"),
    ([SAMPLED | {"counts": [-1]}], "TokensSampled.counts[0]: Expected `int` >= 0"),
    ([SAMPLED | {"token_ids": [2**31]}], "TokensSampled.token_ids[0]"),
    ([QUEUED | {"t_arrival": float("nan")}], "RequestQueued.t_arrival is no finite number"),
    ([QUEUED | {"t_arrival": None}], "RequestQueued.t_arrival: Expected `float`, got `null`"),
    ([QUEUED | {"spans": [[0, 2, "user", ""]]}], "RequestQueued.spans"),
    ([QUEUED | {"n": 10**9}], "RequestQueued.n"),
    ([QUEUED | {"params": {"beam_width": "x"}}], "RequestQueued.params.beam_width"),
    (
        [{"type": "BlocksAllocated", "seq_id": 0, "ids": [9]}],
        "BlocksAllocated.ids: block 9 is outside the pool",
    ),
    ([{"type": "BlocksTouched", "seq_id": 0, "ids": [0], "why": "hit"}], "BlocksTouched.ids"),
    ([{"type": "BlocksCopied", "seq_id": 0, "index": 9, "src": 1, "dst": 2}], "BlocksCopied.index"),
    (
        [{"type": "BlocksEvicted", "ids": [1], "hashes": [], "by_seq": 0, "why": "invalid"}],
        "BlocksEvicted.hashes",
    ),
    (
        [
            {"type": "BlocksStored", "seq_id": 0, "start_index": 0, "ids": [1], "hashes": [HASH]}
            | {"parent": HASH, "token_ids": [1, 2, 3]}
        ],
        "BlocksStored.token_ids has 3 tokens for 1 blocks of 4",
    ),
    ([SNAPSHOT | {"queue": [1, 10**15]}], "PoolSnapshot.queue"),
    ([SNAPSHOT | {"queue": [3, -8]}], "PoolSnapshot.queue"),
    ([SNAPSHOT | {"refs": [1, 10**15, 1]}], "PoolSnapshot.refs"),
    ([SNAPSHOT | {"tables": [[1]]}], "PoolSnapshot.tables has 1 rows, seq_ids has 0"),
    ([STARTED | {"num_blocks": MOST_BLOCKS + 1}], "EngineStarted.num_blocks"),
    ([STARTED | {"block_size": 10**9}], "EngineStarted.block_size"),
    ([STARTED | {"hash_seed": 2**64}], "EngineStarted.hash_seed"),
    ([STARTED | {"knobs": {"speed": 10**400}}], "EngineStarted.knobs.speed"),
]


@pytest.mark.parametrize(("events", "says"), CLAIMS, ids=[str(i) for i in range(len(CLAIMS))])
def test_every_reader_names_line_and_field(tmp_path: Path, events: list[dict[str, Any]], says: str) -> None:
    path = written(tmp_path / "a.jsonl", events)
    for reader in READERS:
        text = refusal(reader, path)
        assert text.startswith("a.jsonl: line 3: "), text
        assert says in text
    report = verify(path)
    assert not report.ok
    assert any(says in line for line in report.violations)


@pytest.mark.parametrize("t", [1e308, -1.0, float("inf")])
def test_a_moment_that_cannot_be_is_refused(tmp_path: Path, t: float) -> None:
    path = written(tmp_path / "a.jsonl", [QUEUED, ADMITTED, SAMPLED], t=t)
    for reader in READERS:
        assert "line 3: t" in refusal(reader, path)


def test_pool_events_need_a_pool(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    event = {"type": "BlocksAllocated", "seq_id": 0, "ids": [1]}
    batch = {"seq": 0, "t": 0.0, "step": 0, "first_event": 0, "events": [event]}
    path.write_bytes(HEADER + json.dumps(batch).encode() + b"\n")
    assert "BlocksAllocated.ids: no EngineStarted came before it" in refusal(replay, path)


def test_a_pool_of_a_million_blocks_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    batch = ev.StepBatch(0, 0.0, 0, 0, [STARTED | {"num_blocks": 1 << 20, "block_size": 1 << 14}])
    path.write_bytes(HEADER + ev.encode_batch(batch) + b"\n")
    replay(path)


# ------------------------------------------------------------------------------------------ fuzzing

HOSTILE = (
    -1,
    0,
    1,
    7,
    2**31,
    2**53,
    2**63,
    10**30,
    -1e308,
    1e12,
    1e308,
    float("nan"),
    float("inf"),
    None,
    [],
    "x",
)


def numbers(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all numbers in a value, of a list's items the first and the last."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from numbers(item, (*where, name))
    elif isinstance(value, list):
        for place in sorted({0, len(value) - 1} if value else set()):
            yield from numbers(value[place], (*where, place))
    elif isinstance(value, int | float):
        yield where


def changed(line: bytes, where: tuple[Any, ...], value: Any) -> bytes:
    """The line with another value at this place; ... takes it out."""
    batch = json.loads(line)
    *way, last = where
    at = batch
    for step in way:
        at = at[step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(batch).encode()


def places(lines: list[bytes]) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """(line, place) of each numeric field of each type of event, at its last occurrence but one."""
    found: dict[tuple[Any, ...], list[tuple[int, tuple[Any, ...]]]] = {}
    for number, line in enumerate(lines):
        batch = json.loads(line)
        for where in numbers(batch):
            named = tuple(w for w in where if isinstance(w, str))
            kind = batch["events"][where[1]]["type"] if len(where) > 1 else ""
            found.setdefault((kind, *named), []).append((number, where))
    for occurrences in found.values():
        yield occurrences[len(occurrences) // 2]


def test_no_number_makes_a_reader_fail(tmp_path: Path) -> None:
    lines = [ev.encode_batch(b) for b in every_event(40)]
    random_ = random.Random(7)
    path = tmp_path / "a.jsonl"
    tried = 0
    for number, where in places(lines):
        for value in (*HOSTILE, ...):
            line = changed(lines[number], where, value)
            path.write_bytes(HEADER + b"\n".join([*lines[:number], line, *lines[number + 1 :], b""]))
            readers = [replay] if random_.random() > 0.01 else [*READERS, verify]
            for reader in readers:
                begun = time.process_time()
                with contextlib.suppress(SetupError):
                    reader(path)
                spent = time.process_time() - begun
                assert spent < 20, f"{where} = {value} took {spent:.1f} s of processor time"
            tried += 1
    assert tried > 1300
