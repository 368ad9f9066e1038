"""Sampler: the noise is Philox to the bit, the filters are transformers', the draws follow them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.ops.cpu import library as native
from engine.ops.cpu import native_ops as cpu_native
from engine.ops.sampler import PARAMS, SampleRows, cutoffs, gumbel, noise_all, noise_at, philox4x32
from engine.ops.sampler import sample as torch_sample
from tests.engine.tiny import QWEN3

Sample = Callable[[torch.Tensor, SampleRows], tuple[list[int], list[int]]]


@pytest.fixture(params=["torch", "native"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Both implementations."""
    if request.param == "torch":
        return torch_sample
    if native.load() is None:
        pytest.skip("no AVX-512-bf16 or no C compiler here")
    return cpu_native.NativeCpuOps(torch.device("cpu"), torch.bfloat16, QWEN3).sample


def rows(n: int, *, position: int | list[int] = 0, **params: float | list[float]) -> SampleRows:
    table = np.zeros(n, PARAMS)
    table["top_p"] = 1
    for name, value in params.items():
        table[name] = value
    return SampleRows(table, np.broadcast_to(np.asarray(position, np.int64), n).copy())


# ------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter: list[int], key: list[int], want: str) -> None:
    got = philox4x32(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert " ".join(f"{int(w):08x}" for w in got) == want


def test_noise_of_some_tokens_is_the_noise_of_all_tokens() -> None:
    seed, branch, position = (torch.tensor(v) for v in ([1, 2**62 + 5], [0, 3], [7, 70_000]))
    everything = noise_all(seed, branch, position, 1001)
    ids = torch.tensor([[0, 1, 2, 3, 1000], [999, 4, 17, 500, 1]])
    assert torch.equal(noise_at(seed, branch, position, ids), everything.gather(1, ids))
    assert everything.shape == (2, 1001)
    assert len(everything.unique()) > 2000


def test_gumbel_noise_has_its_mean_and_variance() -> None:
    words = noise_all(torch.tensor([5]), torch.tensor([0]), torch.tensor([0]), 200_000)
    for dtype in (torch.float32, torch.float64):
        g = gumbel(words, dtype)
        assert g.mean().item() == pytest.approx(0.57722, abs=0.01)
        assert g.var().item() == pytest.approx(np.pi**2 / 6, abs=0.03)
    assert torch.isfinite(gumbel(torch.tensor([0, 1, 2**31]), torch.float32)).all()


# ----------------------------------------------------------------------------------------- filters


@pytest.mark.parametrize("top_k", [0, 1, 5, 300, 5000])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_filters_keep_what_the_processors_of_transformers_keep(
    top_k: int, top_p: float, min_p: float
) -> None:
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    g = torch.Generator().manual_seed(top_k + int(top_p * 100))
    scaled = (
        torch.randn(6, 2000, generator=g, dtype=torch.float64)
        * torch.tensor([0.1, 0.5, 1, 2, 3, 8.0])[:, None]
    )
    want = scaled.clone()
    if top_k:
        want = TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    if min_p:
        want = MinPLogitsWarper(min_p)(None, want)
    n = len(scaled)
    cut = cutoffs(scaled, torch.full((n,), top_k), torch.full((n,), top_p), torch.full((n,), min_p))
    assert torch.equal(scaled >= cut[:, None], want.isfinite())


def test_filters_of_a_row_do_not_hang_on_the_other_rows() -> None:
    g = torch.Generator().manual_seed(1)
    scaled = torch.randn(4, 3000, generator=g) * 2
    k, p, m = torch.tensor([0, 700, 3, 0]), torch.tensor([0.999, 1, 0.8, 1.0]), torch.tensor([0, 0, 0, 0.1])
    alone = torch.cat(
        [cutoffs(scaled[i : i + 1], k[i : i + 1], p[i : i + 1], m[i : i + 1]) for i in range(4)]
    )
    assert torch.equal(cutoffs(scaled, k, p, m), alone)


def test_equal_logits_are_kept_or_dropped_together() -> None:
    scaled = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]])
    cut = cutoffs(scaled, torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert (scaled >= cut[:, None]).tolist() == [[False, True, True, True, False]]


# ------------------------------------------------------------------------------------------- draws


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
@pytest.mark.conformance(108)
def test_draws_follow_the_filtered_distribution(params: dict[str, float], sample: Sample) -> None:
    n, vocab = 20_000, 40
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    ids, bad = sample(logits.expand(n, -1).contiguous(), rows(n, position=list(range(n)), seed=11, **params))
    assert bad == []
    scaled = logits.double() / params["temperature"]
    one = {k: torch.tensor([params.get(k, d)]) for k, d in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))}
    p = scaled.masked_fill(scaled < cutoffs(scaled, **one)[:, None], float("-inf")).softmax(-1)[0].numpy()
    seen = np.bincount(ids, minlength=vocab)
    assert not seen[p == 0].any()
    support = p > 0
    chi2 = ((seen - n * p)[support] ** 2 / (n * p)[support]).sum()
    degrees = support.sum() - 1
    # Wilson-Hilferty: the 1 - 1e-4 quantile of chi-square. The seed is fixed, so this never flickers.
    assert chi2 < degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.conformance(108)
def test_a_sample_depends_on_seed_branch_position_and_nothing_else(sample: Sample) -> None:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 5000, generator=g)
    r = rows(8, position=[3, 3, 4, 9, 9, 9, 100, 1], temperature=0.9)
    r.params["top_k"] = [0, 50, 0, 0, 5, 0, 0, 1]
    r.params["top_p"] = [1, 1, 0.5, 0.99999, 0.9, 1, 1, 1]
    r.params["seed"] = [1, 2, 3, 4, 5, 6, 2**63 - 1, 8]
    r.params["branch"] = [0, 0, 1, 0, 2, 0, 0, 0]
    together, _ = sample(logits, r)
    alone = [
        sample(logits[i : i + 1], SampleRows(r.params[i : i + 1], r.position[i : i + 1]))[0][0]
        for i in range(8)
    ]
    assert together == alone
    backwards, _ = sample(logits.flip(0), SampleRows(r.params[::-1].copy(), r.position[::-1].copy()))
    assert backwards[::-1] == together


def test_branches_and_positions_draw_differently(sample: Sample) -> None:
    logits = torch.zeros(1, 1000).expand(64, -1).contiguous()
    by_position, _ = sample(logits, rows(64, position=list(range(64)), temperature=1.0, seed=9))
    by_branch, _ = sample(logits, rows(64, temperature=1.0, seed=9, branch=list(range(64))))
    by_seed, _ = sample(logits, rows(64, temperature=1.0, seed=list(range(64))))
    assert all(len(set(ids)) > 50 for ids in (by_position, by_branch, by_seed))


def test_greedy_rows_and_random_rows_share_a_batch(sample: Sample) -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(2))
    ids, _ = sample(logits, rows(3, temperature=[0, 1, 5], top_k=[0, 1, 1], seed=1))
    assert ids == logits.argmax(-1).tolist()


def test_rows_that_are_not_finite_are_told(sample: Sample) -> None:
    logits = torch.zeros(4, 50)
    logits[1, 3] = float("nan")
    logits[3, 0] = float("inf")
    assert sample(logits, rows(4))[1] == [1, 3]
    assert sample(logits, rows(4, temperature=1.0, top_p=0.5))[1] == [1, 3]


def test_both_implementations_draw_the_same_tokens() -> None:
    if native.load() is None:
        pytest.skip("no AVX-512-bf16 or no C compiler here")
    native_sample = cpu_native.NativeCpuOps(torch.device("cpu"), torch.bfloat16, QWEN3).sample
    g = torch.Generator().manual_seed(4)
    r = np.random.default_rng(4)
    n = 300
    for vocab in (50, 1003, 20_000):
        logits = torch.randn(n, vocab, generator=g) * torch.linspace(0.2, 6, n)[:, None]
        table = rows(n, position=r.integers(0, 2**20, n).tolist())
        table.params["temperature"] = r.choice([0, 0.5, 1, 2], n)
        table.params["top_k"] = r.choice([0, 1, 3, 20, 200, 10**6], n)
        table.params["top_p"] = r.choice([1, 0.99, 0.8, 0.1, 1e-9], n)
        table.params["min_p"] = r.choice([0, 0.01, 0.5], n)
        table.params["seed"] = r.integers(0, 2**63, n)
        table.params["branch"] = r.integers(0, 50, n)
        assert native_sample(logits, table) == torch_sample(logits, table)
