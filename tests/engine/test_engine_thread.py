"""The engine's thread: what callers may do at any time, and a stream that is whole from load to stop.

Nothing here sleeps: readers wait for events, and a gate in the runner holds a step where a test needs it.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import pytest

from engine import events as ev
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import NotRunning, SetupError
from engine.files.model_files import Progress
from engine.loaded import Built
from engine.params import SamplingParams
from engine.sim.workload import Workload
from tests.engine.mirror import Mirror
from tests.engine.rig import prompt
from tests.toy_runner import ToyFault, ToyRunner, expected

E = TypeVar("E")
VOCAB = 128
END = "[end]"


class Letters:
    """A tokenizer of characters; token 0 ends an answer, as the template writes it."""

    eos_ids = frozenset({0})
    has_chat_template = True

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self.encode_ends(text)[0]

    def encode_ends(self, text: str) -> tuple[list[int], list[int]]:
        ids, ends, at = [], [], 0
        while at < len(text):
            token, width = (0, len(END)) if text.startswith(END, at) else (ord(text[at]), 1)
            at += width
            ids.append(token)
            ends.append(at)
        return ids, ends

    def guard(self, text: str) -> str:
        return text

    def token_bytes(self, token_id: int) -> bytes:
        return END.encode() if token_id == 0 else bytes([token_id]) if 32 <= token_id < 127 else b"~"

    def is_special(self, token_id: int) -> bool:
        return token_id == 0

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        if any("no!" in m["content"] for m in messages):
            raise ValueError("the template refuses this text")
        if any("bug" in m["content"] for m in messages):
            raise RuntimeError("a\nbug in the template")
        return "".join(f"<{m['role']}>{m['content']}{END}" for m in messages) + "<assistant>"


class Gate:
    """Holds the runner before one of its steps until it is opened."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, step: int, when: str) -> None:
        if step == self.step and when == "before":
            self.reached.set()
            assert self.opened.wait(10)


class Live:
    """A started engine over a toy, and a reader that follows its stream through the Mirror."""

    def __init__(
        self,
        *,
        num_blocks: int = 65,
        tokenizer: Any = None,
        fault: Callable[[int, str], None] | None = None,
        build: Callable[[EngineConfig, Progress], Built] | None = None,
        device_interval: float = 0,
        start: bool = True,
        ahead: int = 0,
        **knobs: Any,
    ) -> None:
        def toy(config: EngineConfig, progress: Progress) -> Built:
            for done in range(3):
                progress(done, 2, "weights")
            runner = ToyRunner(num_blocks, config.block_size, VOCAB, config.max_model_len, fault, ahead=ahead)
            return Built(runner, tokenizer, eos_ids=(0,) if tokenizer else ())

        config = EngineConfig(**({"max_num_batched_tokens": 512, "max_num_seqs": 8} | knobs))
        self.engine = Engine(config, build=build or toy, device_interval=device_interval)
        self.arrived: queue.SimpleQueue[ev.StepBatch] = queue.SimpleQueue()
        self.batches: list[ev.StepBatch] = []
        self.mirror = Mirror(num_blocks, 16)
        self.seen = 0
        self.engine.subscribe(self.arrived.put)
        if start:
            self.engine.start()
            self.engine.wait_ready(10)

    @property
    def events(self) -> list[Any]:
        return [e for b in self.batches for e in b.events]

    def all(self, kind: type[E], **fields: Any) -> list[E]:
        return [e for e in self.events if isinstance(e, kind) and self._is(e, fields)]

    @staticmethod
    def _is(event: object, fields: dict[str, Any]) -> bool:
        return all(getattr(event, k) == v for k, v in fields.items())

    def _take(self, timeout: float = 10) -> None:
        batch = self.arrived.get(timeout=timeout)
        self.mirror.apply(batch)  # contiguous, or it fails here
        self.batches.append(batch)

    def until(self, kind: type[E], **fields: Any) -> E:
        """The first event of this kind and these fields that was not given before."""
        while True:
            events = self.events
            for at in range(self.seen, len(events)):
                if isinstance(events[at], kind) and self._is(events[at], fields):
                    self.seen = at + 1
                    return events[at]
            self.seen = len(events)
            self._take()

    def settled(self) -> None:
        """Until all that was asked so far has been carried out."""
        self.engine.request_snapshot()
        self.mirror.compare(self.until(ev.PoolSnapshot))

    def finished(self, request_id: int) -> ev.RequestFinished:
        found = self.all(ev.RequestFinished, request_id=request_id)
        return found[0] if found else self.until(ev.RequestFinished, request_id=request_id)

    def output(self, request_id: int) -> list[int]:
        """Token ids of its first branch."""
        seq_id = self.all(ev.RequestAdmitted, request_id=request_id)[0].seq_id
        out: list[int] = []
        for e in self.all(ev.TokensSampled):
            flat = iter(e.token_ids)
            for s, n in zip(e.seq_ids, e.counts, strict=True):
                row = [next(flat) for _ in range(n)]
                out += row if s == seq_id else []
        return out

    def prompt_of(self, request_id: int) -> list[int]:
        return self.all(ev.RequestQueued, request_id=request_id)[0].prompt_token_ids

    def stop(self) -> None:
        """Stopped, and its stream is whole."""
        self.engine.stop()
        assert not self.engine._thread.is_alive()
        while not self.arrived.empty():
            self._take()
        snapshot, stopped = self.batches[-2:]
        assert isinstance(snapshot.events[-1], ev.PoolSnapshot)
        assert snapshot.events[-1].refs == [] and snapshot.events[-1].seq_ids == []
        self.mirror.compare(snapshot.events[-1])
        assert stopped.events == [ev.EngineStopped("stopped")]
        ended = [e.request_id for e in self.all(ev.RequestFinished)]
        assert sorted(ended) == sorted(e.request_id for e in self.all(ev.RequestQueued))


@pytest.fixture(params=[0, 1], ids=["in turn", "ahead"])
def live(request: pytest.FixtureRequest) -> Iterator[Callable[..., Live]]:
    made: list[Live] = []

    def make(**options: Any) -> Live:
        made.append(Live(**({"ahead": request.param} | options)))
        return made[-1]

    yield make
    for one in made:
        one.engine.stop()
        assert not one.engine._thread.is_alive()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **options)


def ids(length: int, family: int = 0) -> list[int]:
    return prompt(length, family, VOCAB)


# ---------------------------------------------------------------------------------------- the stream


def test_a_stream_is_whole_from_loading_to_the_closing_snapshot(live: Callable[..., Live]) -> None:
    one = live(hash_seed=7)
    request_id = one.engine.submit(ids(40), greedy(5))
    one.finished(request_id)
    one.stop()
    kinds = [type(b.events[0]).__name__ for b in one.batches]
    assert kinds[:4] == ["ModelLoading"] * 3 + ["EngineStarted"]
    assert kinds[-2:] == ["PoolSnapshot", "EngineStopped"]
    (started,) = one.all(ev.EngineStarted)
    assert (started.source, started.model, started.num_blocks, started.block_size) == ("live", "toy", 65, 16)
    assert started.capabilities == ["blocks", "timings"] and started.hash_seed == 7
    assert started.knobs.max_num_batched_tokens == 512
    for batch in one.batches:
        assert ev.decode_batch(ev.encode_batch(batch)) == batch


def test_a_submitted_prompt_streams_its_tokens(live: Callable[..., Live]) -> None:
    one = live()
    numbers = [one.engine.submit(ids(30 + i, i), greedy(6)) for i in range(3)]
    assert numbers == [1, 2, 3]
    for i, number in enumerate(numbers):
        done = one.finished(number)
        assert (done.reason, done.usage.output_tokens) == ("length", 6)
        assert one.output(number) == expected(ids(30 + i, i), 6, VOCAB)
    one.stop()


def test_a_text_goes_through_the_template_and_comes_back_as_text(live: Callable[..., Live]) -> None:
    one = live(tokenizer=Letters())
    number = one.engine.submit("hello", greedy(6, ignore_eos=True), system="be kind", system_name="page.txt")
    one.finished(number)
    queued = one.all(ev.RequestQueued)[0]
    assert queued.prompt_token_ids == Letters().encode("<system>be kind[end]<user>hello[end]<assistant>")
    roles = [(role, name) for _, _, role, name in queued.spans]
    assert ("system", "page.txt") in roles and ("user", "") in roles and queued.conversation is None
    letters = Letters()
    shown = "".join(t for e in one.all(ev.TokensSampled) for t in e.text)
    assert shown == "".join(letters.token_bytes(t).decode() for t in one.output(number) if t)
    assert "text" in one.all(ev.EngineStarted)[0].capabilities
    one.stop()


def test_submissions_from_many_threads_all_come_to_an_end(live: Callable[..., Live]) -> None:
    one = live(num_blocks=30)
    numbers: list[list[int]] = [[] for _ in range(6)]

    def caller(i: int) -> None:
        for j in range(10):
            numbers[i].append(one.engine.submit(ids(20 + j, i), greedy(3)))
            if j % 4 == 0:
                one.engine.abort(numbers[i][-1])

    threads = [threading.Thread(target=caller, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    everyone = sorted(n for some in numbers for n in some)
    assert everyone == list(range(1, 61))
    for number in everyone:
        assert one.finished(number).reason in ("length", "abort")
    one.stop()


def test_a_reader_that_fails_costs_the_others_nothing(
    live: Callable[..., Live], caplog: pytest.LogCaptureFixture
) -> None:
    one = live(start=False)
    one.engine._sinks.insert(0, lambda batch: 1 / 0)
    one.engine.start()
    one.engine.wait_ready(10)
    assert one.finished(one.engine.submit(ids(20), greedy(3))).reason == "length"
    one.stop()
    assert "a sink failed" in caplog.text


def test_device_samples_come_also_while_nothing_runs(live: Callable[..., Live]) -> None:
    one = live(device_interval=0.005)
    one.until(ev.DeviceSample)
    one.until(ev.DeviceSample)
    assert "device" in one.all(ev.EngineStarted)[0].capabilities
    one.stop()


def test_every_start_has_its_own_hash_seed(live: Callable[..., Live]) -> None:
    seeds = [live().until(ev.EngineStarted).hash_seed for _ in range(2)]
    assert None not in seeds and seeds[0] != seeds[1]


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.conformance(106)
def test_what_cannot_be_served_is_refused_in_the_stream_under_its_number(live: Callable[..., Live]) -> None:
    one = live(num_blocks=11, tokenizer=Letters())
    conversation = one.engine.new_conversation()
    cases = [
        (one.engine.submit(ids(160)), "160 tokens"),
        (one.engine.submit([1, VOCAB]), "outside the model's vocabulary"),
        (one.engine.submit([2**80]), "outside the model's vocabulary"),
        (one.engine.submit([]), "empty"),
        (one.engine.submit("no!"), "the template refuses this text"),
        (one.engine.submit("a bug"), "RuntimeError: a bug in the template"),
        (one.engine.submit("hi", conversation=99), "there is no conversation 99"),
        (one.engine.submit("a bug", conversation=conversation), "bug in the template"),
        (one.engine.submit("x" * 200, conversation=conversation), "tokens"),
    ]
    good = one.engine.submit("hi", greedy(3), conversation=conversation)
    for number, words in cases:
        done = one.finished(number)
        assert done.reason == "refused" and done.error and words in done.error and "\n" not in done.error
    assert one.finished(good).reason in ("length", "stop")
    assert one.prompt_of(good) == Letters().encode("<user>hi[end]<assistant>")  # refusals left no trace
    one.stop()


def test_without_a_tokenizer_a_text_is_refused(live: Callable[..., Live]) -> None:
    one = live()
    conversation = one.engine.new_conversation()
    for number in (one.engine.submit("hi"), one.engine.submit("hi", conversation=conversation)):
        assert one.finished(number).error == "this engine has no tokenizer: submit token ids"
    assert one.all(ev.EngineError, fatal=False)  # the conversation could not be made
    one.stop()


def test_submit_takes_texts_and_whole_numbers_only(live: Callable[..., Live]) -> None:
    one = live(tokenizer=Letters())
    for wrong in ([1.5], ["a"], [None], 7):
        with pytest.raises(TypeError):
            one.engine.submit(wrong)  # type: ignore[arg-type]
    more: list[dict[str, Any]] = [
        {"system": 5}, {"system_name": b"x"}, {"salt": 5}, {"priority": 1.5},
        {"conversation": []}, {"spans": 5},
    ]  # fmt: skip
    for wrong_one in more:
        with pytest.raises(TypeError):
            one.engine.submit("a", **wrong_one)
    with pytest.raises(TypeError, match="system must be a text, not 5"):
        one.engine.new_conversation(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a conversation takes text"):
        one.engine.submit([1, 2], conversation=one.engine.new_conversation())
    one.engine.pause()
    mine = ids(20)
    numbers = [one.engine.submit(mine, greedy(2)), one.engine.submit(np.array(mine), greedy(2))]  # type: ignore[arg-type]
    mine.clear()  # a caller may reuse its list
    one.engine.resume()
    for number in numbers:
        one.finished(number)
        assert one.output(number) == expected(ids(20), 2, VOCAB)
    one.stop()


# -------------------------------------------------------------------------------------------- aborts


@pytest.mark.conformance(84, 107)
def test_an_abort_reaches_a_request_that_waits_runs_or_is_finished(live: Callable[..., Live]) -> None:
    gate = Gate(2)
    one = live(fault=gate, max_num_seqs=1)
    running, waiting = one.engine.submit(ids(40), greedy(50)), one.engine.submit(ids(40, 1), greedy(3))
    after = one.engine.submit(ids(40, 2), greedy(3))
    assert gate.reached.wait(10)  # in the middle of running's third step
    one.engine.abort(waiting)
    one.engine.abort(running)
    gate.opened.set()
    assert one.finished(waiting).reason == "abort" and one.finished(waiting).usage.output_tokens == 0
    assert one.finished(running).reason == "abort" and one.finished(running).usage.output_tokens == 3
    assert one.finished(after).reason == "length"
    for number in (running, waiting, after, 99):
        one.engine.abort(number)
    one.settled()
    assert len(one.all(ev.RequestFinished)) == 3
    one.stop()


def test_what_was_asked_while_the_model_loads_is_done_when_it_is_there(live: Callable[..., Live]) -> None:
    go = threading.Event()

    def build(config: EngineConfig, progress: Progress) -> Built:
        assert go.wait(10)
        return Built(ToyRunner(65, 16, VOCAB))

    one = live(build=build, start=False)
    first, second = one.engine.submit(ids(20), greedy(3)), one.engine.submit(ids(20, 1), greedy(3))
    one.engine.abort(second)
    one.engine.start()
    assert not one.engine.is_ready
    with pytest.raises(TimeoutError):
        one.engine.wait_ready(0)
    go.set()
    assert one.finished(first).reason == "length" and one.finished(second).reason == "abort"
    assert one.engine.is_ready
    started = next(b for b in one.batches if any(isinstance(e, ev.EngineStarted) for e in b.events))
    assert one.finished(first).timings.t_arrival >= started.t  # its clock begins when there is an engine
    one.stop()


# -------------------------------------------------------------------- pause, single steps, slow motion


def test_a_paused_engine_queues_and_steps_only_when_told(live: Callable[..., Live]) -> None:
    one = live()
    one.engine.pause()
    number = one.engine.submit(ids(40), greedy(6))
    one.settled()
    assert one.all(ev.RequestQueued) and not one.all(ev.StepScheduled)
    for steps in (1, 2):
        one.engine.step_once()
        one.until(ev.StepCompleted)
        one.settled()
        assert len(one.all(ev.StepCompleted)) == steps
    one.engine.step_once()
    one.engine.step_once()
    one.until(ev.StepCompleted)
    one.until(ev.StepCompleted)
    one.settled()
    assert len(one.all(ev.StepCompleted)) == 4
    one.engine.resume()
    assert one.finished(number).usage.output_tokens == 6
    one.stop()


def test_a_step_asked_for_in_vain_is_forgotten(live: Callable[..., Live]) -> None:
    one = live()
    one.engine.step_once()  # it runs: there is nothing to single
    one.settled()
    one.engine.pause()
    one.engine.step_once()  # paused, but without work
    one.settled()
    one.engine.submit(ids(20), greedy(3))
    one.settled()
    assert not one.all(ev.StepScheduled)
    one.stop()


def test_slow_motion_marks_its_steps_and_ends_at_once(live: Callable[..., Live]) -> None:
    one = live()
    one.engine.set_slow(1000)
    number = one.engine.submit(ids(20), greedy(4))
    assert one.until(ev.StepCompleted).slow
    one.settled()  # commands are carried out in its pauses
    assert len(one.all(ev.StepCompleted)) == 1
    one.engine.set_slow(1e-4)
    assert one.until(ev.StepCompleted).slow
    one.engine.set_slow(0)
    one.finished(number)
    done = one.finished(one.engine.submit(ids(20, 1), greedy(2)))
    assert done.reason == "length" and not one.all(ev.StepCompleted)[-1].slow
    one.stop()


def test_stop_does_not_wait_for_slow_motion_or_a_pause(live: Callable[..., Live]) -> None:
    for slow in (True, False):
        one = live()
        if slow:
            one.engine.set_slow(1000)
        number = one.engine.submit(ids(20), greedy(50))
        one.until(ev.StepCompleted)
        if not slow:
            one.engine.pause()
        one.stop()
        assert one.finished(number).reason in ("abort", "length" if not slow else "abort")


# --------------------------------------------------------------------------------- snapshot and reset


def test_a_snapshot_comes_while_idle_and_stands_alone(live: Callable[..., Live]) -> None:
    one = live()
    one.finished(one.engine.submit(ids(40), greedy(3)))
    before = len(one.batches)
    one.engine.request_snapshot()
    snapshot = one.until(ev.PoolSnapshot)
    assert one.batches[-1].events == [snapshot] and len(one.batches) == before + 1
    one.mirror.compare(snapshot)
    assert snapshot.hashed_ids and not snapshot.tables
    one.stop()


@pytest.mark.conformance(43, 92)
def test_a_reset_clears_when_idle_and_says_no_while_blocks_are_in_use(live: Callable[..., Live]) -> None:
    gate = Gate(1)
    one = live(fault=gate)
    number = one.engine.submit(ids(40), greedy(3))
    assert gate.reached.wait(10)
    one.engine.reset_prefix_cache()
    gate.opened.set()
    assert "blocks are in use" in one.until(ev.EngineError, fatal=False).message
    one.finished(number)
    assert one.all(ev.CacheCleared) == []
    one.engine.reset_prefix_cache()
    one.until(ev.CacheCleared)
    again = one.engine.submit(ids(40), greedy(3))
    assert one.finished(again).usage.cached_tokens == 0 and one.output(again) == one.output(number)
    one.stop()


@pytest.mark.conformance(43, 44)
def test_a_reset_of_a_running_engine_takes_its_requests_back_and_changes_no_token(
    live: Callable[..., Live],
) -> None:
    gate = Gate(3)
    one = live(fault=gate)
    numbers = [one.engine.submit(ids(40, i), greedy(8)) for i in range(2)]
    assert gate.reached.wait(10)
    one.engine.reset_prefix_cache(reset_running=True)
    gate.opened.set()
    for i, number in enumerate(numbers):
        one.finished(number)
        assert one.output(number) == expected(ids(40, i), 8, VOCAB)
    assert len(one.all(ev.CacheCleared)) == 1 and len(one.all(ev.RequestPreempted)) == 2
    one.stop()


# ------------------------------------------------------------------------------------- conversations


@pytest.mark.conformance(32, 113)
def test_turns_wait_for_the_running_one_and_history_hits(live: Callable[..., Live]) -> None:
    one = live(tokenizer=Letters(), num_blocks=100)
    conversation = one.engine.new_conversation(system="you are a page of forty characters!")
    texts = ("first question", "second question", "third question")
    numbers = [one.engine.submit(t, greedy(20), conversation=conversation) for t in texts]
    for number in numbers:
        one.finished(number)
    order = [e.request_id for e in one.events if isinstance(e, (ev.RequestQueued, ev.RequestFinished))]
    assert order == [n for number in numbers for n in (number, number)]
    held: list[int] = []
    for number, text in zip(numbers, texts, strict=True):
        mine = one.prompt_of(number)
        assert mine[: len(held)] == held  # token ids are kept, sampled ones included
        assert f"<user>{text}" in "".join(map(chr, mine))
        lookup = one.all(ev.PrefixLookup, request_id=number)[0]
        computed = max(0, len(held) - 1)  # the last token of an answer has no KV
        assert lookup.hit_tokens == computed // 16 * 16 and not lookup.template_rewrote_history
        held = mine + one.output(number)
        assert one.all(ev.RequestQueued, request_id=number)[0].conversation == conversation
    ends = [one.all(ev.RequestFinished, request_id=n)[0].timings for n in numbers]
    for before, after in pairwise(ends):  # a turn arrives when the answer before it is there
        assert before.t_last_token is not None and after.t_arrival >= before.t_last_token
    one.stop()


def test_turns_of_two_conversations_run_side_by_side(live: Callable[..., Live]) -> None:
    gate = Gate(1)
    one = live(tokenizer=Letters(), fault=gate)
    a, b = one.engine.new_conversation(), one.engine.new_conversation()
    first = one.engine.submit("one", greedy(30), conversation=a)
    assert gate.reached.wait(10)
    second = one.engine.submit("two", greedy(30), conversation=b)
    third = one.engine.submit("three", greedy(30), conversation=a)
    gate.opened.set()
    one.until(ev.RequestQueued, request_id=second)
    assert not one.all(ev.RequestFinished, request_id=first)
    for number in (first, second, third):
        one.finished(number)
    one.stop()


@pytest.mark.conformance(84)
def test_an_aborted_turn_ends_as_aborted_and_the_next_one_goes_on(live: Callable[..., Live]) -> None:
    gate = Gate(2)
    one = live(tokenizer=Letters(), fault=gate)
    conversation = one.engine.new_conversation()
    first, second, third = (
        one.engine.submit(t, greedy(30, ignore_eos=True), conversation=conversation) for t in "abc"
    )
    assert gate.reached.wait(10)
    one.engine.abort(second)  # it waits in its conversation, in no queue of the engine
    one.engine.abort(first)
    gate.opened.set()
    assert one.finished(second).reason == one.finished(first).reason == "abort"
    assert one.finished(third).reason == "length"
    text = "".join(map(chr, one.prompt_of(third)))
    assert "<user>a" in text and "<user>b" not in text and "<user>c" in text
    one.stop()


@pytest.mark.conformance(113)
def test_a_full_conversation_says_so_and_what_trimming_costs(live: Callable[..., Live]) -> None:
    one = live(tokenizer=Letters(), num_blocks=11)
    conversation = one.engine.new_conversation()
    one.finished(one.engine.submit("x" * 60, greedy(10), conversation=conversation))
    done = one.finished(one.engine.submit("y" * 80, greedy(10), conversation=conversation))
    assert done.reason == "refused" and done.error is not None
    assert "this conversation is full" in done.error and "without the oldest turn" in done.error
    again = one.finished(one.engine.submit("z", greedy(5), conversation=conversation))
    assert again.reason in ("length", "stop") and again.usage.cached_tokens >= 64
    one.stop()


# ---------------------------------------------------------------------------------- starts that fail


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (SetupError("no such model: nope; give a folder"), "no such model: nope; give a folder"),
        (RuntimeError("torch\nsaid no"), "engine: RuntimeError: torch said no"),
    ],
)
def test_a_failing_build_raises_in_wait_ready_and_the_stream_still_ends(
    live: Callable[..., Live], error: Exception, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def build(config: EngineConfig, progress: Progress) -> Built:
        progress(0, 1, "weights")
        raise error

    one = live(build=build, start=False)
    one.engine.start()
    with pytest.raises(SetupError) as reported:
        one.engine.wait_ready(10)
    assert str(reported.value) == words == str(one.engine.failure) and not one.engine.is_ready
    assert one.until(ev.EngineStopped).reason in ("the start failed", "failed")
    kinds = [type(e).__name__ for e in one.events]
    assert kinds == ["ModelLoading", "EngineError", "EngineStopped"]
    assert one.all(ev.EngineError)[0].fatal and one.all(ev.EngineError)[0].message == words


def test_what_a_start_freezes_is_given_back_at_the_end(live: Callable[..., Live]) -> None:
    """Else it outlives the interpreter's last collection, and nanobind lists thirty lines of leaks at exit."""

    def build(config: EngineConfig, progress: Progress) -> Built:
        runner = ToyRunner(65, 16, VOCAB)
        runner.weights_bytes = 1
        return Built(runner)

    engine = live(build=build).engine
    engine.wait_ready(10)
    assert gc.get_freeze_count() > 0
    engine.stop()
    assert gc.get_freeze_count() == 0


def test_settings_that_contradict_each_other_fail_the_start(live: Callable[..., Live]) -> None:
    one = live(start=False, enable_chunked_prefill=False, max_num_batched_tokens=100)
    one.engine.start()
    with pytest.raises(SetupError, match="without chunked prefill"):
        one.engine.wait_ready(10)
    one.until(ev.EngineStopped)
    assert not one.all(ev.EngineStarted)


def test_stop_ends_a_start_that_is_still_loading(live: Callable[..., Live]) -> None:
    loading, go = threading.Event(), threading.Event()

    def build(config: EngineConfig, progress: Progress) -> Built:
        progress(1, 100, "weights")
        loading.set()
        assert go.wait(10)
        progress(2, 100, "weights")
        raise AssertionError("stop() should have ended this")

    one = live(build=build, start=False)
    one.engine.start()
    assert loading.wait(10)
    stopper = threading.Thread(target=one.engine.stop)
    stopper.start()
    while not one.engine._give_up_start:
        pass
    go.set()
    stopper.join(10)
    with pytest.raises(SetupError, match="stopped before it was ready"):
        one.engine.wait_ready(10)
    assert one.until(ev.EngineStopped).reason == "stopped" and not one.all(ev.EngineError)


def test_an_engine_that_never_started_stops(live: Callable[..., Live]) -> None:
    one = live(start=False)
    one.engine.stop()
    assert one.arrived.empty()


# ------------------------------------------------------------------------------------------ failures


@pytest.mark.conformance(111)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_exception_in_a_step_fails_that_step_s_requests_only(live: Callable[..., Live], when: str) -> None:
    def fault(step: int, moment: str) -> None:
        if step == 2 and moment == when:
            raise ToyFault("the device fell off")

    one = live(fault=fault, max_num_seqs=2)
    a, b, c = (one.engine.submit(ids(40, i), greedy(6)) for i in range(3))
    for number in (a, b):
        done = one.finished(number)
        assert (done.reason, done.error) == ("error", "ToyFault: the device fell off")
    assert one.finished(c).reason == "length" and one.output(c) == expected(ids(40, 2), 6, VOCAB)
    again = one.engine.submit(ids(40), greedy(6))
    assert one.finished(again).reason == "length" and one.output(again) == expected(ids(40), 6, VOCAB)
    assert [e.fatal for e in one.all(ev.EngineError)] == [False]
    one.stop()


def test_a_command_that_fails_is_told_and_costs_nobody_anything(
    live: Callable[..., Live], caplog: pytest.LogCaptureFixture
) -> None:
    one = live()
    one.engine._post(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    assert one.until(ev.EngineError).message == "a command failed: ZeroDivisionError: division by zero"
    assert one.finished(one.engine.submit(ids(20), greedy(2))).reason == "length"
    one.stop()


def test_a_failure_of_the_engine_itself_ends_the_stream_and_is_remembered(
    live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = live()
    monkeypatch.setattr(one.engine._core.scheduler, "schedule", lambda flights: 1 / 0)  # type: ignore[union-attr]
    number = one.engine.submit(ids(20), greedy(2))
    assert one.until(ev.EngineError).fatal
    assert one.finished(number).reason == "abort"
    one.until(ev.PoolSnapshot)
    assert one.until(ev.EngineStopped).reason == "failed"
    assert str(one.engine.failure).startswith("engine: ZeroDivisionError") and not one.engine.is_ready


def test_after_a_failure_every_request_has_ended_and_none_is_taken(
    live: Callable[..., Live], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Running, waiting, behind another turn of its conversation, and still in the inbox."""
    gate = Gate(2)
    one = live(tokenizer=Letters(), fault=gate, max_num_seqs=1)
    core, conversation = one.engine._live(), one.engine.new_conversation()
    numbers = [one.engine.submit(ids(40, i), greedy(50)) for i in range(2)]
    numbers += [one.engine.submit(text, greedy(9), conversation=conversation) for text in ("run", "wait")]
    assert gate.reached.wait(10)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("no such queue")

    monkeypatch.setattr(core.scheduler, "schedule", broken)
    monkeypatch.setattr(core.scheduler, "remove", broken)  # not even the pool can be tidied up
    numbers.append(one.engine.submit(ids(9), greedy(2)))
    gate.opened.set()
    assert {one.finished(n).reason for n in numbers} <= {"abort", "error"}
    assert one.until(ev.EngineStopped).reason == "failed"
    with pytest.raises(NotRunning, match="no more requests"):
        one.engine.submit(ids(9), greedy(2))


def test_after_stop_nothing_is_taken(live: Callable[..., Live]) -> None:
    one = live(tokenizer=Letters())
    one.stop()
    for late in (
        lambda: one.engine.submit(ids(9)),
        lambda: one.engine.submit("hello"),
        one.engine.new_conversation,
        lambda: one.engine.play(Workload("none", "", 0, ())),
    ):
        with pytest.raises(NotRunning, match="the engine takes no more requests: it was stopped"):
            late()
    assert one.engine.load_over


def test_parameters_that_are_none_end_their_request(live: Callable[..., Live]) -> None:
    one = live(tokenizer=Letters())
    wrong: list[Any] = [{"max_tokens": 3}, "hot", 5]
    numbers = [one.engine.submit(ids(9), params) for params in wrong]
    numbers += [one.engine.submit("hello", params) for params in wrong]
    good = one.engine.submit(ids(9), greedy(2))
    assert {one.finished(n).reason for n in numbers} <= {"error", "refused"}
    assert one.finished(good).reason == "length"
    one.stop()


@pytest.mark.conformance(84, 107)
def test_stop_in_the_middle_of_a_run_ends_everything_and_closes_the_stream(live: Callable[..., Live]) -> None:
    gate = Gate(2)
    one = live(tokenizer=Letters(), fault=gate, max_num_seqs=1)
    conversation = one.engine.new_conversation()
    numbers = [one.engine.submit(ids(40), greedy(50)), one.engine.submit(ids(40, 1), greedy(50))]
    numbers += [one.engine.submit(t, greedy(9), conversation=conversation) for t in ("run", "wait")]
    assert gate.reached.wait(10)
    stopper = threading.Thread(target=one.engine.stop)
    stopper.start()
    gate.opened.set()
    stopper.join(10)
    one.stop()  # a second time is no harm
    assert [one.finished(n).reason for n in numbers] == ["abort"] * 4
