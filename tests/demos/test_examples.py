"""The five Enters of a newcomer, with the real tokenizer: sizes that the screen's story rests on."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine.chat.conversation import Conversation
from engine.errors import SetupError
from engine.events import StepBatch
from engine.files.model_files import ModelFiles
from engine.files.tokenizer import Tokenizer, load
from engine.loaded import Built
from kvtop.play import demo
from kvtop.play.examples import Example, load_examples
from kvtop.state.dashboard import DashboardState
from tests.toy_runner import ToyRunner

USABLE, BLOCK = 545, 16


@pytest.fixture(scope="module")
def tokenizer(builtin_model: ModelFiles) -> Tokenizer:
    return load(builtin_model)


@pytest.fixture(scope="module")
def examples() -> tuple[Example, ...]:
    return load_examples()


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer, examples: tuple[Example, ...]) -> list[list[list[int]]]:
    """Token ids of every prompt, by example."""
    return [
        [Conversation(tokenizer, p.system, p.system_name).turn(p.text).token_ids for p in e.prompts]
        for e in examples
    ]


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_there_are_five_and_each_says_what_and_why(examples: tuple[Example, ...]) -> None:
    assert [len(e.prompts) for e in examples] == [1, 1, 1, 8, 1]
    for e in examples:
        assert e.title and e.why and e.seen
        assert len(f"Enter sends example 5 of 5: {e.title}") <= 78


def test_page_one_is_62_blocks(prompts: list[list[list[int]]]) -> None:
    first, second, changed, _, again = prompts
    assert 1_030 <= len(second[0]) <= len(first[0]) <= 1_040
    assert common(first[0], second[0]) // BLOCK == 62
    assert common(first[0], changed[0]) < BLOCK
    assert again == first


def test_only_the_first_word_differs(examples: tuple[Example, ...]) -> None:
    page, changed = examples[0].prompts[0].system, examples[2].prompts[0].system
    assert page.split(maxsplit=1)[0] == "Ada"
    assert changed.split(maxsplit=1)[0] == "Augusta"
    assert page.split(maxsplit=1)[1] == changed.split(maxsplit=1)[1]


def test_eight_pages_fit_together_and_push_out_page_one(
    prompts: list[list[list[int]]], examples: tuple[Example, ...]
) -> None:
    """With the fewest tokens that the answers of 1 to 3 can have, which leaves the most blocks free."""
    pages = [-(-(len(p) + examples[3].prompts[0].max_tokens - 1) // BLOCK) for p in prompts[3]]
    assert sum(pages) <= USABLE
    hit = common(prompts[0][0], prompts[1][0]) // BLOCK
    first, second, changed = (len(p[0]) // BLOCK for p in prompts[:3])
    free = USABLE - first - (second - hit) - changed
    own_tails_first = (first - hit) + (second - hit)
    # A partial last block that one page gives back may be taken by another.
    assert sum(pages) - len(pages) >= free + own_tails_first + hit


def test_all_pages_differ_in_their_first_block(prompts: list[list[list[int]]]) -> None:
    heads = [tuple(p[:BLOCK]) for p in [prompts[0][0], prompts[2][0], *prompts[3]]]
    assert len(set(heads)) == len(heads)


@pytest.mark.parametrize("answer", [None, 20])
def test_the_five_enters(tokenizer: Tokenizer, examples: tuple[Example, ...], answer: int | None) -> None:
    """The whole story on a toy model over the real tokenizer, with long and short answers."""
    batches: queue.SimpleQueue[StepBatch] = queue.SimpleQueue()
    state = DashboardState(strict=True)
    engine = Engine(EngineConfig(), build=lambda *_: Built(ToyRunner(USABLE + 1, BLOCK, 49_152), tokenizer))
    engine.subscribe(batches.put)
    engine.start()
    engine.wait_ready()

    def until(done: Callable[[], bool]) -> None:
        while not done():
            state.apply(batches.get(timeout=30))

    views = []
    for example in examples:
        ids = [
            engine.submit(
                p.text,
                SamplingParams(max_tokens=min(p.max_tokens, answer or p.max_tokens), temperature=0),
                system=p.system,
                system_name=p.system_name,
            )
            for p in example.prompts
        ]
        until(lambda: all(i in state.requests and state.requests[i].done for i in ids))  # noqa: B023
        views.append([state.requests[i] for i in ids])
    engine.stop()
    first, second, changed, pages, again = views
    assert first[0].is_cold
    assert second[0].hit_blocks == 62
    assert second[0].hit_ids == first[0].last_table[:62]
    assert changed[0].hit_blocks == 0
    assert all(v.is_cold and v.preemptions == 0 for v in pages)
    evicted = [i for m in state.moments if m.kind == "evicted" for i in m.ids]
    assert set(first[0].last_table[:62]) <= set(evicted)
    assert again[0].hit_blocks == 0
    assert again[0].explanation is not None
    assert again[0].explanation.reason == "evicted"
    tail_first = [first[0].last_table.index(i) for i in evicted if i in first[0].last_table[:62]]
    assert tail_first == sorted(tail_first, reverse=True)


def test_a_broken_examples_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "examples.toml").write_text("[[example]]\ntitle = 3\n")
    with pytest.raises(SetupError) as caught:
        load_examples(tmp_path)
    assert "examples.toml" in str(caught.value)
    assert len(str(caught.value)) <= 200
    assert (demo.folder() / "examples.toml").is_file()
