"""Every reason a look-up can have, each from the engine's own events."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from engine import events as ev
from kvtop.record.redact import Redactor
from kvtop.state.dashboard import DashboardState
from kvtop.state.explain import Explanation
from tests.kvtop.streams import Storm

SIZE = 4
PAGE = [10 + i % 40 for i in range(16)]


def scene(seed: int = 4) -> Storm:
    storm = Storm(seed, num_blocks=40, block_size=SIZE)
    assert storm.core.paging.caching
    return storm


def state_of(storm: Storm, change: Callable[[ev.StepBatch], ev.StepBatch] = lambda b: b) -> DashboardState:
    state = DashboardState(strict=True)
    for batch in storm.batches:
        state.apply(change(batch))
    return state


def why(storm: Storm, request_id: int) -> Explanation:
    found = state_of(storm).requests[request_id].explanation
    assert found is not None
    assert found.sentence.endswith(".")
    assert len(found.short) < 60
    row = found.row(request_id)
    assert row["id"] == request_id
    assert None not in row.values()
    return found


def ask(storm: Storm, prompt: list[int], salt: str | None = None) -> int:
    rid = storm.submit(prompt, max_tokens=1, salt=salt)
    storm.drain()
    return rid


def test_never_seen() -> None:
    storm = scene()
    found = why(storm, ask(storm, PAGE))
    assert (found.reason, found.first_miss_block, found.missing_tokens) == ("never_seen", 0, 16)
    assert found.divergence_token is None


def test_diverged_names_the_first_token_that_differs() -> None:
    storm = scene()
    ask(storm, PAGE)
    for at in (1, 5, 7, 8, 11):
        other = PAGE[:at] + [9] + PAGE[at + 1 :]
        found = why(storm, ask(storm, other))
        assert (found.reason, found.divergence_token, found.first_miss_block) == ("diverged", at, at // SIZE)
        assert found.hit_blocks == at // SIZE
        assert found.missing_tokens == 16 - found.hit_blocks * SIZE


def test_an_utterly_different_prompt_was_never_seen() -> None:
    storm = scene()
    ask(storm, PAGE)
    assert why(storm, ask(storm, [9] * 12)).reason == "never_seen"


def test_new_text_after_a_shared_prefix() -> None:
    storm = scene()
    ask(storm, PAGE[:10])  # two full blocks; the third is not full and never stored
    found = why(storm, ask(storm, PAGE[:8] + [1, 2, 3, 4, 5]))
    assert (found.reason, found.hit_blocks, found.first_miss_block) == ("never_seen", 2, 2)
    assert "new text" in found.short


def test_none_and_last_token_and_shorter_than_a_block() -> None:
    storm = scene()
    ask(storm, PAGE)
    found = why(storm, ask(storm, [*PAGE[:12], 3]))
    assert (found.reason, found.first_miss_block, found.missing_tokens) == ("none", None, 1)
    found = why(storm, ask(storm, PAGE))
    assert (found.reason, found.hit_blocks, found.first_miss_block) == ("last_token", 3, 3)
    found = why(storm, ask(storm, [1, 2]))
    assert (found.reason, found.first_miss_block, found.queried_blocks) == ("shorter_than_block", None, 0)
    assert why(storm, ask(storm, PAGE[:4])).reason == "last_token"


def test_evicted_tells_when_by_whom_and_how_often_it_was_read() -> None:
    storm = scene()
    ask(storm, PAGE)
    ask(storm, PAGE)
    thief = ask(storm, [1 + i % 7 for i in range(150)])
    found = why(storm, ask(storm, PAGE))
    assert (found.reason, found.first_miss_block) == ("evicted", 1), "the tail goes first, the root stays"
    assert found.evicted is not None
    assert (found.evicted.by, found.evicted.hits) == (thief, 1)
    assert found.evicted.seconds_ago >= 0
    assert found.row(1)["evicted"]["by"] == thief
    assert f"#{thief}" in found.short


def test_salt() -> None:
    storm = scene()
    ask(storm, PAGE, salt="a")
    for salt in (None, "b"):
        assert why(storm, ask(storm, PAGE, salt=salt)).reason == "salt"
    assert why(storm, ask(storm, PAGE, salt="a")).reason == "last_token"


def test_reset() -> None:
    storm = scene()
    ask(storm, PAGE)
    assert storm.core.reset_prefix_cache()
    assert why(storm, ask(storm, PAGE)).reason == "reset"


def test_in_flight() -> None:
    storm = scene()
    storm.core.scheduler._threshold = 4  # a chunk a step: block 0 is published, the others not yet
    first = storm.submit(PAGE, max_tokens=1)
    storm.submit([9] * 5, max_tokens=1)
    storm.core.step()
    second = storm.submit(PAGE, max_tokens=1)
    storm.drain()
    found = why(storm, second)
    assert found.reason == "in_flight"
    assert f"#{first}" in found.sentence


def test_template_rewrote_history() -> None:
    storm = scene()
    ask(storm, PAGE)
    rid = ask(storm, PAGE[:6] + [1] * 8)

    def marked(batch: ev.StepBatch) -> ev.StepBatch:
        events = [
            replace(e, template_rewrote_history=True)
            if isinstance(e, ev.PrefixLookup) and e.request_id == rid
            else e
            for e in batch.events
        ]
        return replace(batch, events=events)

    found = state_of(storm, marked).requests[rid].explanation
    assert found is not None
    assert (found.reason, found.divergence_token) == ("template_rewrote_history", 6)


def test_the_reason_is_judged_at_the_look_up_and_never_changes() -> None:
    storm = scene()
    ask(storm, PAGE)
    rid = ask(storm, PAGE)
    before = why(storm, rid)
    storm.core.reset_prefix_cache()
    ask(storm, [1 + i % 7 for i in range(150)])
    assert why(storm, rid) == before


def test_a_redacted_recording_explains_without_tokens() -> None:
    storm = scene()
    ask(storm, PAGE)
    rid = ask(storm, PAGE[:5] + [9] * 8)
    found = state_of(storm, Redactor()).requests[rid].explanation
    assert found is not None
    assert (found.reason, found.divergence_token, found.hit_blocks) == ("diverged", None, 1)


def test_an_unknown_request_is_a_key_error_and_no_cache_is_none() -> None:
    storm = scene()
    assert state_of(storm).requests.get(99) is None
    rid = storm.submit(PAGE)
    storm.core.flush()
    assert state_of(storm).requests[rid].explanation is None
