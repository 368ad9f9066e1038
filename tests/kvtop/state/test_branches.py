"""Samples, beams and drafts in the dashboard's state, the summary, the prompt box and on stdout."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from engine import EngineConfig, SamplingParams
from engine import events as ev
from engine.loaded import Built
from kvtop.cli.headless import Job, run
from kvtop.cli.prompts import Prompt
from kvtop.play.composer import branching
from kvtop.record.verify import verify_batches
from kvtop.state.dashboard import DashboardState
from tests.kvtop.streams import LETTERS, VOCAB, Storm
from tests.toy_runner import ToyRunner


def played(**params: Any) -> tuple[DashboardState, Storm]:
    storm = Storm(3, num_blocks=64, block_size=4)
    storm.submit([1 + i % 7 for i in range(18)], 12, **params)
    storm.drain()
    state = DashboardState(strict=True)
    for batch in storm.stop():
        state.apply(batch)
    assert verify_batches(storm.batches).ok
    return state, storm


@pytest.mark.conformance(101, 102)
def test_samples_have_their_texts_and_the_saving_is_counted() -> None:
    state, storm = played(n=2, ignore_eos=True)
    (view,) = state.requests.values()
    sampled = [e for b in storm.batches for e in b.events if isinstance(e, ev.TokensSampled)]
    for at, text in enumerate(view.branch_texts()):
        assert text == "".join(t for e in sampled for i, t in zip(e.seq_ids, e.text, strict=True) if i == at)
    row = view.summary()
    assert row["text"] == row["texts"][0] and len(set(row["texts"])) == 2
    # 18 tokens and 11 more with KV: 4 blocks of the prompt are shared, 4 each are not.
    assert row["blocks"] == {"held": 4 + 2 * 4, "without_sharing": 2 * 8} and row["output_tokens"] == 24
    assert view.sharing() == "2 samples held 12 blocks, 16 without sharing: 25 % saved"


def test_a_single_answer_tells_of_no_branches() -> None:
    state, _ = played()
    row = next(iter(state.requests.values())).summary()
    assert "texts" not in row and "blocks" not in row


@pytest.mark.conformance(101, 103)
def test_the_best_beam_is_the_answer_and_dropped_ones_leave_nothing() -> None:
    state, storm = played(beam_width=2)
    (view,) = state.requests.values()
    assert (
        view.usage is not None and len(view.seq_ids) == 1 and view.usage.output_tokens == len(view.output_ids)
    )
    assert view.text == state.vocabulary.text(t for t in view.output_ids if t != 3)
    row = view.summary()
    assert "texts" not in row and 0 < row["blocks"]["held"] < row["blocks"]["without_sharing"]
    assert not state.requests.sequences and state.pool.active == 0
    pruned = [e.seq_id for b in storm.batches for e in b.events if isinstance(e, ev.BeamPruned)]
    assert view.dropped_ids == pruned


@pytest.mark.conformance(104)
def test_drafts_are_counted() -> None:
    state = DashboardState(strict=True)
    storm = Storm(3, num_blocks=64, block_size=4, vocab=2)
    for i in range(4):
        storm.submit([i % 2] * 20, 12)
    storm.drain()
    for batch in storm.stop():
        state.apply(batch)
    reported = [e for b in storm.batches for e in b.events if isinstance(e, ev.DraftVerified)]
    assert reported and state.steps.drafts == sum(e.proposed for e in reported)
    assert state.summary()["speculation"] == {
        "proposed": state.steps.drafts,
        "accepted": state.steps.drafts_accepted,
    }


@pytest.mark.conformance(101, 104)
@pytest.mark.parametrize("what", [ev.BeamPruned, ev.DraftVerified, ev.SequenceForked])
def test_verify_notices_a_changed_branch(what: type) -> None:
    """A beam that was never dropped, a draft that was not right, a child of another parent."""
    storm = Storm(3, num_blocks=64, block_size=4, vocab=2)
    storm.submit([i % 2 for i in range(18)], 12, beam_width=2)
    storm.submit([1] * 20, 12, n=2)
    storm.drain()
    batches = storm.stop()
    found = [(i, j) for i, b in enumerate(batches) for j, e in enumerate(b.events) if type(e) is what]
    for i, j in found[:6]:
        e = batches[i].events[j]
        new = {
            ev.BeamPruned: lambda e: ev.BeamPruned(e.request_id, e.seq_id + 100),
            ev.DraftVerified: lambda e: ev.DraftVerified(e.seq_id, e.proposed, e.accepted + 1),
            ev.SequenceForked: lambda e: ev.SequenceForked(e.request_id, e.parent + 100, e.child),
        }[what](e)
        events = [*batches[i].events[:j], new, *batches[i].events[j + 1 :]]
        changed = ev.StepBatch(batches[i].seq, batches[i].t, batches[i].step, batches[i].first_event, events)
        assert not verify_batches([*batches[:i], changed, *batches[i + 1 :]]).ok
    assert found


# --------------------------------------------------------------------------------------------- asking


def test_what_the_prompt_box_understands() -> None:
    params = SamplingParams(temperature=0.7)
    assert branching("/n 4 Who was Ada?", params) == ("Who was Ada?", SamplingParams(temperature=0.7, n=4))
    assert branching("/beam 3  Who?", params) == ("Who?", SamplingParams(temperature=0.7, beam_width=3))
    assert branching("/n 2", params) == ("", SamplingParams(temperature=0.7, n=2))
    assert branching("/n 1", SamplingParams(beam_width=4)) == ("", SamplingParams())
    for text in ("What is /n 4?", "/etc/hosts", "/number 4", "n 4"):
        assert branching(text, params) is None
    for text, why in (
        ("/n", "needs a number"),
        ("/beam four x", "needs a number"),
        ("/n 5000 x", "n must be"),
    ):
        with pytest.raises(ValueError, match=why):
            branching(text, params)


def answer(asks: list[Prompt], as_json: bool) -> tuple[int, str, str]:
    out, err = io.BytesIO(), io.StringIO()

    def build(config: EngineConfig, progress: Any) -> Built:
        return Built(ToyRunner(64, 4, VOCAB), Letters(), eos_ids=())

    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=64, block_size=4)
    code = run(config, Job(asks, as_json=as_json, once=as_json), build=build, out=out, err=err)
    return code, out.getvalue().decode(), err.getvalue()


class Letters:
    """A tokenizer of letters for prompts that are token ids."""

    eos_ids = frozenset[int]()
    vocab_size = VOCAB
    has_chat_template = False

    def token_bytes(self, token: int) -> bytes:
        return LETTERS[token]

    def is_special(self, token: int) -> bool:
        return False


def test_headless_prints_each_sample_and_what_sharing_saved() -> None:
    asks = [
        Prompt([1, 2, 3, 4, 5], params=SamplingParams(max_tokens=6, temperature=0, n=3)),
        Prompt([1, 2, 3, 4, 5], params=SamplingParams(max_tokens=6, beam_width=3)),
        Prompt([5, 4], params=SamplingParams(max_tokens=4, temperature=0)),
    ]
    code, out, err = answer(asks, False)
    lines = out.splitlines()
    assert code == 0 and [line[:4] for line in lines[:3]] == ["[1] ", "[2] ", "[3] "] and len(lines) == 5
    assert all(len(line) == 10 for line in lines[:3]) and len(lines[3]) == 6 and len(lines[4]) == 4
    assert "3 samples held 7 blocks, 9 without sharing: 22 % saved" in err and "3 beams held" in err
    code, out, _ = answer(asks, True)
    rows = json.loads(out)["requests"]
    assert rows[0]["texts"] == [line[4:] for line in lines[:3]] and rows[1]["text"] == lines[3]
    assert "texts" not in rows[1] and "blocks" not in rows[2]


# --------------------------------------------------------------------------------------------- screen


def test_the_chat_shows_every_sample_and_the_saving() -> None:
    from rich.style import Style

    from kvtop.widgets.chat.layout import Layouter

    state, _ = played(n=2)
    (view,) = state.requests.values()
    drawn = []
    for line in Layouter(state, 100, lambda name: Style(), False).lines(view):
        passage = line.passage.text[line.start : line.end] if line.passage else ""
        drawn.append("".join(t for t, _ in line.lead) + passage + "".join(t for t, _ in line.parts))
    first, second = view.branch_texts()
    assert drawn[-2:] == [f"   {first}", f" 2 {second}"]
    assert any("2 samples held 12 blocks, 16 without sharing: 25 % saved" in line for line in drawn)
