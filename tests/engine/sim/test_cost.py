"""The cost model: close to what others measured, and monotonous where physics is."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import sizing
from engine.errors import SetupError
from engine.sim.cost import Cost, Work, _windowed
from engine.sim.hardware import find, gpus
from tests.benchmarks.cost_model import BOUND, FIGURES, MEAN_BOUND, Figure

KNOWN = sorted(sizing.known_models())


def work(model: str) -> Work:
    return Work.of(sizing.load(model)[1])


def cost(model: str, machine: str, weights: str = "bf16", value_bytes: int = 2) -> Cost:
    return Cost(work(model), find(machine), weights, value_bytes)


# ------------------------------------------------------------------------------- against published figures


@pytest.mark.parametrize("figure", [f for f in FIGURES if not f.why_off], ids=lambda f: f.what)
def test_published_figure(figure: Figure) -> None:
    assert abs(figure.error()) <= BOUND, f"{figure.published} published, {figure.predicted():.1f} predicted"


def test_mean_error_over_all_and_over_those_held_out() -> None:
    counted = [f for f in FIGURES if not f.why_off]
    assert fmean(abs(f.error()) for f in counted) <= MEAN_BOUND
    assert fmean(abs(f.error()) for f in counted if not f.fitted) <= MEAN_BOUND
    assert sum(f.fitted for f in counted) <= len(counted) // 5


def test_a_token_of_qwen3_8b_on_an_h100_as_vllm_measured_it() -> None:
    assert cost("qwen3-8b", "h100").step([(350, 1)], 1).total == pytest.approx(7.28e-3, rel=0.03)


# ------------------------------------------------------------------------------------- the article's cases


def test_two_thousand_tokens_on_one_h100_take_longer_than_often_said() -> None:
    """100 to 200 ms are what four H100s take: one does not multiply 2,000 x 68 billion numbers in that time even at its
    full published rate."""
    one, four = cost("llama-3.1-70b", "h100", "int4"), cost("llama-3.1-70b", "4xh100", "fp8")
    floor = 2 * 2000 * one.work.dense / find("h100").gpu.bf16
    assert 0.27 < floor < one.step([(0, 2000)], 1).total < 0.5
    assert 0.1 <= four.step([(0, 2000)], 1).total <= 0.2
    assert 0.1 <= cost("llama-3.1-70b", "b200").step([(0, 2000)], 1).total <= 0.22


def test_chunks_cost_little_and_free_the_decodes() -> None:
    """100,000 tokens at once stall everybody for the whole prompt; in chunks of 2,048 a decode waits for one chunk."""
    model = cost("llama-3.1-70b", "h100", "int4")
    whole = model.step([(0, 100_000), *[(500, 1)] * 8], 9).total
    chunks = [
        model.step([(at, min(2040, 100_000 - at)), *[(500, 1)] * 8], 8).total
        for at in range(0, 100_000, 2040)
    ]
    assert whole <= sum(chunks) < 1.1 * whole
    assert max(chunks) < whole / 20


# ----------------------------------------------------------------------------------------------- physics


@given(
    model=st.sampled_from(KNOWN),
    machine=st.sampled_from(sorted(gpus())),
    weights=st.sampled_from(sorted(sizing.BITS)),
    rows=st.lists(st.tuples(st.integers(0, 50_000), st.integers(1, 4000)), min_size=1, max_size=8),
    more=st.integers(1, 1000),
)
def test_more_work_never_takes_less(
    model: str, machine: str, weights: str, rows: list[tuple[int, int]], more: int
) -> None:
    it = cost(model, machine, weights)
    base = it.step(rows, 1)
    assert all(part >= 0 for part in base)
    assert base.total == pytest.approx(sum(base[:7]))
    assert it.step([*rows, (more, 1)], 1).total > base.total
    (start, n), *rest = rows
    if n > 1:
        assert it.step([(start + more, n), *rest], 1).total >= base.total
        assert it.step([(start, n + more), *rest], 1).total > base.total
    assert it.step(rows, 2).total >= base.total


@given(start=st.integers(0, 60), n=st.integers(1, 60), window=st.integers(1, 40) | st.none())
def test_what_a_window_sees(start: int, n: int, window: int | None) -> None:
    seen = [range(max(0, q - window + 1) if window else 0, q + 1) for q in range(start, start + n)]
    assert _windowed(start, n, window) == (
        len(set().union(*seen)),
        sum(map(len, seen)),
    )


def test_a_window_saves_reading() -> None:
    gemma = cost("gemma-3-27b", "h100")
    short, long = gemma.step([(1000, 1)], 1), gemma.step([(100_000, 1)], 1)
    read = gemma.work.shape.held(100_001) - gemma.work.shape.held(1001)
    assert long.moved - short.moved == pytest.approx(2 * read)


def test_a_small_batch_reads_few_experts_and_a_large_one_all() -> None:
    mixture = cost("qwen3-30b-a3b", "h100")
    one, many = (mixture.step([(10, 1)] * n, n).linear for n in (1, 1024))
    active = 2 * (mixture.work.dense + mixture.work.experts * mixture.work.chosen)
    assert one == pytest.approx(active / (0.85 * 3.35e12), rel=0.01)
    assert many > 5 * one


def test_gpus_share_the_work_but_exchange() -> None:
    one, eight = (cost("llama-3.1-70b", m).step([(0, 2048)], 1) for m in ("h200", "8xh200"))
    assert eight.linear == pytest.approx(one.linear / 8)
    assert one.exchange == 0 < eight.exchange
    assert one.total / 8 < eight.total < one.total / 3


def test_a_latent_is_held_by_every_gpu() -> None:
    latent = cost("deepseek-v3", "8xh200", "fp8")
    a, b = (latent.step([(n, 1)], 1).moved for n in (1000, 2000))
    assert b - a == pytest.approx(1000 * 2 * latent.work.shape.values)


def test_fp8_needs_fp8_cores_to_be_fast_over_a_prompt() -> None:
    for machine, faster in (("h100", True), ("a100", False)):
        eight, sixteen = (
            cost("llama-3.1-8b", machine, w).step([(0, 2048)], 1).linear for w in ("fp8", "bf16")
        )
        assert (eight < 0.7 * sixteen) is faster


# ----------------------------------------------------------------------------------------------- the table


def test_every_device_is_plausible_and_has_a_source() -> None:
    for gpu in gpus().values():
        assert 8 << 30 <= gpu.memory <= 512 << 30 and 2e11 < gpu.bandwidth < 2e13
        assert gpu.fp8 is None or gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=0.03)
        assert len(gpu.source) > 10
    assert {"rtx-4070", "h100", "h200", "b200"} <= gpus().keys()


@pytest.mark.parametrize(
    ("given", "count", "name"),
    [("h100", 1, "h100"), ("RTX 4070", 1, "rtx-4070"), ("4xH100", 4, "h100"), ("8 x b200", 8, "b200")],
)
def test_names_of_machines(given: str, count: int, name: str) -> None:
    machine = find(given)
    assert (machine.count, machine.gpu.name) == (count, name)


@pytest.mark.parametrize("name", ["h1000", "", "0xh100", "65xh100", "x" * 500, "h100\n4x"])
def test_no_such_machine(name: str) -> None:
    with pytest.raises(SetupError) as error:
        find(name)
    assert len(str(error.value)) <= 200


@pytest.mark.parametrize("model", KNOWN)
def test_a_models_parts_add_up(model: str) -> None:
    it = work(model)
    counted = sizing.count_parameters(
        {k: v for k, v in sizing.load(model)[1].items() if k != "vision_config"}
    )
    assert counted is not None
    embeddings = counted.total - it.dense - it.experts
    assert embeddings in (it.head, 2 * it.head) or "gemma" in model
    assert counted.active == pytest.approx(it.dense + it.experts * it.chosen + embeddings, rel=1e-6)


def test_an_unknown_family_is_refused_by_name() -> None:
    config: dict[str, Any] = sizing.load("llama-3.1-8b")[1] | {"model_type": "falcon_h9"}
    with pytest.raises(SetupError, match="falcon_h9"):
        Work.of(config)
