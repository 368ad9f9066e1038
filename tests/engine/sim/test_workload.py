"""Workloads: the file's rules, and that what is played has the rates, shares and lengths that it says."""

from __future__ import annotations

import random
import tomllib
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pvariance
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import SetupError
from engine.sim import workload as w
from engine.sim.arrivals import Arrival, Load
from engine.sim.synthetic import Language, SyntheticTokenizer

LANGUAGE = Language.of(SyntheticTokenizer(1 << 17), 1 << 17)
SEEDS = st.integers(0, 2**32)
TEN = w.Length(10, 10, 10)
SHORT = w.Unique(TEN, TEN)


def workload(
    prompts: w.Prompts, arrivals: w.Arrivals, requests: int, seed: int = 0, start: float = 0.0
) -> w.Workload:
    return w.Workload("test", "a test", seed, (w.Stream("s", requests, arrivals, prompts, start),))


def play(spec: w.Workload, start: float = 0.0, takes: float = 1.0) -> list[Arrival]:
    """Everything that comes, with an engine that answers after `takes` seconds with as many tokens as asked for."""
    load = Load(spec, LANGUAGE, start)
    out: list[Arrival] = []
    running: list[tuple[float, int, Arrival]] = []
    while not load.over or running:
        ends = min((r[0] for r in running), default=float("inf"))
        comes = load.next_at if load.next_at is not None and not load.over else float("inf")
        now = min(ends, comes)
        if ends <= comes:
            running.sort(key=lambda r: r[:2])
            _, _, arrival = running.pop(0)
            load.finished(arrival, now, LANGUAGE.text(arrival.params.seed or 0, arrival.params.max_tokens))
            continue
        new = load.take(now)
        out += new
        running += [(now + takes, len(out) + i, a) for i, a in enumerate(new)]
    return out


# ------------------------------------------------------------------------------------------- arrivals


@given(seed=SEEDS, rate=st.floats(0.1, 50), burstiness=st.sampled_from([0.25, 1.0, 4.0]))
@settings(max_examples=25)
def test_open_arrivals_have_their_rate_and_burstiness(seed: int, rate: float, burstiness: float) -> None:
    n = 1000
    times = [a.at for a in play(workload(SHORT, w.Poisson(rate, burstiness), n, seed), start=5.0)]
    assert len(times) == n
    assert times == sorted(times)
    gaps = [b - a for a, b in pairwise([5.0, *times])]
    deviation = (burstiness * n) ** -0.5
    assert fmean(gaps) * rate == pytest.approx(1, abs=6 * deviation)
    assert pvariance(gaps) * rate**2 == pytest.approx(1 / burstiness, rel=1.0)


@given(seed=SEEDS, size=st.integers(1, 9), within=st.floats(0, 8), requests=st.integers(1, 40))
def test_bursts_come_when_they_should(seed: int, size: int, within: float, requests: int) -> None:
    arrivals = play(workload(SHORT, w.Bursts(10.0, size, within), requests, seed, start=3.0))
    assert len(arrivals) == requests
    for i, arrival in enumerate(arrivals):
        begins = 3.0 + 10.0 * (i // size)
        assert begins <= arrival.at <= begins + within + 1e-9


@given(seed=SEEDS, users=st.integers(1, 9), think=st.floats(0, 5), requests=st.integers(1, 60))
@settings(max_examples=50)
def test_a_closed_loop_never_has_more_under_way_than_users(
    seed: int, users: int, think: float, requests: int
) -> None:
    arrivals = play(workload(SHORT, w.Closed(users, think), requests, seed))
    assert len(arrivals) == requests
    for arrival in arrivals:
        assert sum(a.at <= arrival.at < a.at + 1.0 for a in arrivals) <= users
    if not think:
        last = max(a.at for a in arrivals)
        assert last == pytest.approx((requests - 1) // users), "without thinking nobody pauses"


def test_users_think_as_long_as_they_should_on_average() -> None:
    arrivals = play(workload(SHORT, w.Closed(50, 8.0), 3000))
    span = max(a.at for a in arrivals)
    assert 3000 / span == pytest.approx(50 / (8.0 + 1.0), rel=0.1)


# -------------------------------------------------------------------------------------------- prompts


@given(seed=SEEDS, prefixes=st.integers(1, 12), rounds=st.integers(1, 6))
@settings(max_examples=25)
def test_prefix_repetition_uses_each_prefix_equally_often(seed: int, prefixes: int, rounds: int) -> None:
    prompts = w.PrefixRepetition(w.Length(32, 32, 32), w.Length(7, 7, 7), prefixes, TEN)
    arrivals = play(workload(prompts, w.Poisson(100), prefixes * rounds, seed))
    shares = Counter(tuple(a.token_ids[:32]) for a in arrivals)
    assert sorted(shares.values()) == [rounds] * prefixes
    assert all(len(a.token_ids) == 39 and a.params.max_tokens == 10 for a in arrivals)
    assert len({tuple(a.token_ids[32:]) for a in arrivals}) == len(arrivals), "every suffix is its own"
    names = {tuple(a.token_ids[:32]): a.spans[0][3] for a in arrivals}
    assert len(set(names.values())) == prefixes


@given(seed=SEEDS, groups=st.integers(1, 8), each=st.integers(1, 8))
@settings(max_examples=25)
def test_shared_prefix_has_its_groups(seed: int, groups: int, each: int) -> None:
    prompts = w.SharedPrefix(w.Length(20, 60, 40), w.Length(5, 5, 5), TEN, groups, each)
    arrivals = play(workload(prompts, w.Poisson(10), groups * each, seed))
    shares = Counter(tuple(a.token_ids[:-5]) for a in arrivals)
    assert len(shares) == groups
    assert set(shares.values()) == {each}
    assert all(20 <= len(p) <= 60 for p in shares)


def test_a_chat_is_the_whole_history_and_one_more() -> None:
    prompts = w.Chat(w.Length(5, 20, 12), w.Length(3, 30, 16), 4, w.Length(50, 50, 50), 2)
    arrivals = play(workload(prompts, w.Closed(3, 2.0), 60))
    by_user: dict[int, list[Arrival]] = {}
    for a in arrivals:
        assert a.user is not None
        by_user.setdefault(a.user.number, []).append(a)
        assert [s for s, *_ in a.spans] == [0, *(e for _, e, *_ in a.spans)][:-1], "spans leave no gap"
        assert a.spans[-1][1] == len(a.token_ids)
    systems = set()
    for turns in by_user.values():
        for i, arrival in enumerate(turns):
            systems.add(tuple(arrival.token_ids[:50]))
            if i % 4 == 0:
                assert [r for *_, r, _ in arrival.spans] == ["system", "user"]
                continue
            before = turns[i - 1]
            answer = LANGUAGE.text(before.params.seed or 0, before.params.max_tokens)
            assert arrival.token_ids[: len(before.token_ids) + len(answer)] == before.token_ids + answer
            assert [r for *_, r, _ in arrival.spans] == ["system", *["user", "assistant"] * (i % 4), "user"]
    assert len(systems) == 2


def test_an_answer_that_failed_leaves_no_span() -> None:
    load = Load(workload(w.Chat(), w.Closed(1, 0.0), 2), LANGUAGE, 0.0)
    (first,) = load.take(0.0)
    load.finished(first, 1.0, [])
    (second,) = load.take(1.0)
    assert second.token_ids[: len(first.token_ids)] == first.token_ids
    assert [r for *_, r, _ in second.spans] == ["system", "user", "user"]


@given(seed=SEEDS, low=st.integers(1, 50), more=st.integers(0, 500), sigma=st.sampled_from([0.0, 0.3, 1.0]))
@settings(max_examples=50)
def test_lengths_stay_in_bounds_and_around_their_middle(seed: int, low: int, more: int, sigma: float) -> None:
    middle = low + more / 2
    length = w.Length(low, low + more, middle, sigma)
    chance = random.Random(seed)
    drawn = [length.draw(chance) for _ in range(800)]
    assert all(low <= n <= low + more for n in drawn)
    if sigma:
        assert abs(median(drawn) - middle) <= max(1.0, 0.2 * sigma * middle + 0.05 * middle)
    else:
        assert fmean(drawn) == pytest.approx(middle, abs=6 * (more + 1) / (12 * 800) ** 0.5)


# ---------------------------------------------------------------------------------------- determinism


@pytest.mark.parametrize("name", w.shipped())
def test_the_same_seed_gives_the_same_load(name: str) -> None:
    spec = w.load_workload(name)
    small = replace(spec, streams=tuple(replace(s, requests=min(s.requests, 20)) for s in spec.streams))
    first, again = ([(a.at, a.token_ids, a.spans, a.params, a.stream) for a in play(small)] for _ in range(2))
    assert first == again
    assert len(first) == small.requests
    other = [a.token_ids for a in play(replace(small, seed=spec.seed + 1))]
    assert other != [ids for _, ids, *_ in first]


def test_prompts_do_not_depend_on_how_fast_the_engine_is() -> None:
    spec = workload(w.PrefixRepetition(TEN, TEN, 3, TEN), w.Closed(3, 1.0), 30)
    slow, fast = (
        {(a.user.number, a.user.turn): a.token_ids[-10:] for a in play(spec, takes=t) if a.user}
        for t in (0.1, 20.0)
    )
    assert {k: v for k, v in slow.items() if k in fast} == {k: v for k, v in fast.items() if k in slow}


def test_streams_do_not_disturb_each_other() -> None:
    one = w.Stream("one", 50, w.Poisson(5), SHORT)
    two = w.Stream("two", 50, w.Bursts(2.0, 5), SHORT)
    both = play(w.Workload("x", "x", 0, (one, two)))
    alone = play(w.Workload("x", "x", 0, (two,)))
    assert [(a.at, a.token_ids) for a in both if a.stream == "two"] == [(a.at, a.token_ids) for a in alone]
    assert [a.at for a in both] == sorted(a.at for a in both)


# ------------------------------------------------------------------------------------------ the files


def test_an_hour_is_2000_requests() -> None:
    hour = w.load_workload("hour")
    assert hour.requests == 2000
    assert {type(s.arrivals) for s in hour.streams} == {w.Poisson, w.Bursts, w.Closed}
    times = [a.at for a in play(hour, takes=5.0)]
    assert len(times) == 2000
    assert 3200 < max(times) < 3700


def test_what_ships() -> None:
    assert w.shipped() == ["chat", "hour", "prefix_repetition", "shared-prefix"]
    vllm = w.load_workload("prefix_repetition").streams[0].prompts
    assert vllm == w.PrefixRepetition(), "vLLM's defaults"


def test_defaults_are_the_originals() -> None:
    gsp = w.SharedPrefix()
    assert (gsp.num_groups, gsp.prompts_per_group) == (64, 16)
    assert [x.mean for x in (gsp.system_prompt_len, gsp.question_len, gsp.output_len)] == [2048, 128, 256]
    rep = w.PrefixRepetition()
    assert rep.num_prefixes == 10
    assert [x.mean for x in (rep.prefix_len, rep.suffix_len, rep.output_len)] == [256, 256, 128]


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("""
        [[stream]]
        requests = 3
        arrivals = { kind = "poisson", rate = 2 }
        prompts = { kind = "random", input_len = { mean = 50, sigma = 0.5 }, output_len = { low = 3, high = 9 } }
    """)
    mine = w.load_workload(str(path), seed=9)
    assert (mine.name, mine.title, mine.seed, mine.requests) == ("mine", "mine", 9, 3)
    assert mine.streams[0].name == "stream 1"
    assert mine.streams[0].prompts == w.Unique(w.Length(1, 1000, 50, 0.5), w.Length(3, 9, 6.0))


GOOD = """
[[stream]]
requests = 3
arrivals = { kind = "poisson", rate = 2 }
prompts = { kind = "random" }
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[[stream]]", "[stream]", "stream: must be [[stream]] tables"),
        ("[[stream]]", "sed = 1\n[[stream]]", "sed: no such key"),
        ("[[stream]]", "seed = -1\n[[stream]]", "seed: must be a whole number between"),
        ("[[stream]]", "seed = true\n[[stream]]", "seed: must be a whole number between"),
        ("requests = 3", "", "stream 1: requests: is missing"),
        ("requests = 3", "requests = 0", "requests: must be a whole number between 1 and 1,000,000"),
        ("requests = 3", "requests = 3.5", "requests: must be a whole number"),
        ("requests = 3", "requests = 3\nreqests = 4", "reqests: no such key"),
        ("requests = 3", 'requests = 3\nname = ""', "name: must be a text of 1 to 40"),
        ("requests = 3", "requests = 3\nstart = -1", "start: must be a number between 0"),
        ('"poisson"', '"poison"', "arrivals: kind: must be one of poisson, bursts, closed"),
        ('kind = "poisson", ', "", "arrivals: kind: is missing"),
        ("rate = 2", "rate = 0", "rate: must be a number between"),
        ("rate = 2", "rate = nan", "rate: must be a number between"),
        ("rate = 2", "rat = 2", "rate: is missing"),
        ('kind = "random"', 'kind = "random", input_len = 0', "input_len: must be between 1"),
        ('kind = "random"', 'kind = "random", input_len = "long"', "input_len: must be a number of tokens"),
        (
            'kind = "random"',
            'kind = "random", input_len = { low = 5, high = 4 }',
            "low must not be over high",
        ),
        ('kind = "random"', 'kind = "random", input_len = { low = 5 }', "input_len: high: is missing"),
        ('kind = "random"', 'kind = "random", input_len = { mean = 5, sigma = 9 }', "sigma: must be"),
        (
            'kind = "random"',
            'kind = "random", input_len = { low = 5, high = 6, mid = 5 }',
            "mid: no such key",
        ),
        ('kind = "random"', 'kind = "chat"', "a chat needs closed arrivals"),
        ("requests = 3", "requests = 3\nprompts = 3", "no TOML"),
        ('{ kind = "random" }', '"random"', "prompts: must be a table with a kind"),
        (GOOD, "", "stream: is missing"),
        (GOOD, "stream = []", "needs at least one"),
        (GOOD, "stream = [3]", "must be [[stream]] tables"),
        (GOOD, "\xff", "no TOML"),
        (GOOD, GOOD.replace("requests", 'name = "a"\nrequests') * 2, "two streams have the same name"),
        (GOOD, "a = " + "[" * 5000, "no TOML"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(GOOD.replace(old, new).encode("latin-1"))
    with pytest.raises(SetupError) as error:
        w.load_workload(str(path))
    assert says in str(error.value)
    assert str(error.value).startswith("--load bad.toml: ")
    assert len(str(error.value)) <= 200


@pytest.mark.parametrize("name", ["", "hours", "no/such.toml", "x" * 5000, ".", "a\0b.toml"])
def test_no_such_load(name: str) -> None:
    with pytest.raises(SetupError) as error:
        w.load_workload(name)
    assert len(str(error.value)) <= 200


def test_more_requests_than_groups_have() -> None:
    raw: dict[str, Any] = tomllib.loads(GOOD)
    raw["stream"][0] |= {
        "requests": 5,
        "prompts": {"kind": "generated-shared-prefix", "num_groups": 2, "prompts_per_group": 2},
    }
    with pytest.raises(SetupError, match="requests: must be a whole number between 1 and 4"):
        w.parse(raw, "x")
