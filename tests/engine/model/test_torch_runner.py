"""TorchRunner: sizes and their messages, rows that follow tables, bad rows, copies, the step budget."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.errors import SetupError
from engine.files.model_config import ModelConfig
from engine.model import kv_cache, layers, torch_runner
from engine.model.batch import packed
from engine.model.decoder import Decoder
from engine.model.kv_cache import CacheSize, check_cpu_memory, gpu_kv_bytes, plan_size
from engine.model.layers import rope_bytes, rope_table
from engine.model.step_cost import SECONDS, StepCost
from engine.model.torch_runner import TorchRunner, clamp_model_len
from engine.params import SamplingParams
from engine.step.runner import Plan
from engine.step.sequence import Request, Sequence
from tests.engine.rig import row_for
from tests.engine.tiny import CPU64, LLAMA, Driver, random_weights

SMOL = ModelConfig("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True)


def runner(config: EngineConfig = CPU64, model: ModelConfig = LLAMA) -> TorchRunner:
    return TorchRunner.from_weights(model, random_weights(model), config)


# -------------------------------------------------------------------------------------------- sizes


def test_the_default_cache_is_192_mib_and_says_its_sum() -> None:
    cache = plan_size(SMOL, EngineConfig(), torch.bfloat16)
    assert (cache.num_blocks, cache.bytes_per_block, cache.usable_tokens) == (546, 368_640, 545 * 16)
    assert str(cache) == (
        "30 layers x 3 kv heads x 64 head dim x 2 (K, V) x 2 bytes = 22.5 KiB a token, "
        "x 16 = 360 KiB a block, x 546 blocks = 192 MiB, 8,720 tokens"
    )


def test_blocks_come_from_the_number_the_memory_or_the_gpu() -> None:
    def blocks(memory: int | None = None, **config: int) -> int:
        return plan_size(SMOL, EngineConfig(**config), torch.bfloat16, memory).num_blocks

    assert blocks(num_blocks=7, kv_cache_memory=1 << 30) == 7
    assert blocks(kv_cache_memory=10 * 368_640) == 10
    assert blocks(memory=20 * 368_640 + 5) == 20
    with pytest.raises(SetupError, match=r"360 KiB, but two blocks .* take 720 KiB"):
        blocks(kv_cache_memory=368_640)


@pytest.mark.conformance(12)
def test_a_given_length_must_fit_and_one_not_given_is_clamped() -> None:
    cache = CacheSize(2, 2, 16, 8, 16, 11)
    assert clamp_model_len(None, 4096, cache) == 160
    assert clamp_model_len(None, 100, cache) == 100
    assert clamp_model_len(160, 4096, cache) == 160
    with pytest.raises(
        SetupError, match=r"--max-model-len 161 needs 11 blocks, the pool has 10 \(160 tokens\)"
    ):
        clamp_model_len(161, 4096, cache)
    assert runner(replace(CPU64, num_blocks=11)).max_model_len == 160
    with pytest.raises(SetupError, match="over the model's limit of 512"):
        runner(replace(CPU64, max_model_len=513))


def test_too_little_memory_is_told_with_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CacheSize(30, 3, 64, 2, 16, 546)
    check_cpu_memory(256 << 20, cache, 448 << 20)
    with pytest.raises(SetupError, match="weights 256 MiB \\+ KV 192 MiB = 448 MiB, free 400 MiB") as e:
        check_cpu_memory(256 << 20, cache, 400 << 20)
    assert len(str(e.value)) <= 200
    monkeypatch.setattr(torch_runner, "free_memory", lambda: 1000)
    with pytest.raises(SetupError, match=r"too little memory.*; lower --num-blocks or"):
        runner(replace(CPU64, num_blocks=64))
    with pytest.raises(SetupError, match=r"too little memory.*; lower --kv-cache-memory or"):
        runner(replace(CPU64, num_blocks=None))
    with pytest.raises(SetupError, match=r"KV 0 bytes.*; take a smaller model"):
        check_cpu_memory(256 << 20, None, 0)
    with pytest.raises(SetupError, match="KV needs 1,002 TiB"):
        kv_cache.allocate(CacheSize(1000, 1024, 512, 2, 1024, 513), torch.device("cpu"), torch.bfloat16)


@pytest.mark.parametrize("claimed", [1 << 22, 1 << 30])
def test_a_context_that_a_file_only_claims_costs_nothing(claimed: int) -> None:
    """20 blocks hold 304 tokens: the RoPE table ends there, and is the one of a model that claims no more."""
    r = runner(replace(CPU64, num_blocks=20), replace(LLAMA, max_position_embeddings=claimed))
    assert r.max_model_len == 19 * 16
    assert isinstance(r.model, Decoder)
    assert len(r.model.rope.cos) == len(r.model.rope.sin) == 19 * 16
    modest = runner(replace(CPU64, num_blocks=20), LLAMA)
    assert isinstance(modest.model, Decoder)
    assert torch.equal(r.model.rope.cos, modest.model.rope.cos[: 19 * 16])
    prompt = [i % 199 for i in range(250)]
    assert Driver(r).generate([prompt], 5) == Driver(modest).generate([prompt], 5)


def test_a_table_made_in_parts_is_the_one_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rope_table(LLAMA, 100, torch.device("cpu"))
    monkeypatch.setattr(layers, "_ROPE_ROWS", 7)
    parts = rope_table(LLAMA, 100, torch.device("cpu"))
    assert torch.equal(whole.cos, parts.cos) and torch.equal(whole.sin, parts.sin)
    assert rope_bytes(LLAMA, 100) == whole.cos.nbytes + whole.sin.nbytes


def test_rope_is_part_of_the_memory_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^20 blocks of one slot: the table takes 64 MiB, which alone decide here."""
    config = replace(CPU64, num_blocks=(1 << 20) + 1, block_size=1)
    model = replace(LLAMA, max_position_embeddings=1 << 30)
    kv = plan_size(model, config, torch.float64)
    free = kv.num_blocks * kv.bytes_per_block
    monkeypatch.setattr(torch_runner, "free_memory", lambda: free)
    with pytest.raises(SetupError, match=r"KV 1 GiB \+ RoPE 64 MiB = 1.06 GiB, free 1 GiB"):
        runner(config, model)


def test_a_gpu_gives_what_neither_weights_nor_others_take() -> None:
    g = 1 << 30
    # 80 GiB, others hold 4, this process 20 with 22 at the peak: 72 - 4 - 22.
    assert gpu_kv_bytes(80 * g, 56 * g, 20 * g, 22 * g, 0.9) == 46 * g


# --------------------------------------------------------------------------------------------- rows


def test_rows_are_reused_and_grow() -> None:
    r = runner(replace(CPU64, max_num_seqs=2))
    driver = Driver(r)
    prompts = [[i + 1, 2, 3, 4 + i] * 5 for i in range(9)]
    alone = [driver.generate([p], 5)[0] for p in prompts]
    assert driver.generate(prompts, 5) == alone
    assert driver.generate(prompts, 5, batch=3) == alone


def test_only_the_changed_part_of_a_table_is_taken_over() -> None:
    r = runner()
    driver = Driver(r)
    seq = driver.add(list(range(40)))
    driver.step(1000)
    row = r._rows._rows[seq.seq_id]
    seq.table[0] = 1000  # no row says so: it must not be seen
    driver.step(1)
    assert seq.table_sent == len(seq.table)
    assert r._rows._tables[row, 0] != 1000
    seq.table[0], seq.table_sent = 7, 0
    driver.step(1)
    assert r._rows._tables[row, : len(seq.table)].tolist() == seq.table


@pytest.mark.conformance(11)
def test_a_token_never_goes_into_the_null_block() -> None:
    r = runner()
    driver = Driver(r)
    seq = driver.add([1] * 20)
    seq.table = [5, 0]
    with pytest.raises(ValueError, match="null block"):
        r.execute(Plan(0, [row_for(seq, 0, 20, True)]))
    assert not r.cache[:, :, 0].any()


def test_copies_run_before_the_step_writes() -> None:
    r = runner()
    driver = Driver(r)
    a = driver.add([3, 1, 4, 1, 5])
    driver.step(1000)
    # b is a fork of a, whose shared block is copied before b's next token is written
    b = driver.add(list(a.tokens))
    b.num_computed, b.table = 5, [driver.free.pop()]
    src, dst = a.table[0], b.table[0]
    output = r.execute(Plan(0, [row_for(a, 5, 1, True), row_for(b, 5, 1, True)], copies=[(src, dst)]))
    assert output.token_ids[0] == output.token_ids[1]
    assert torch.equal(r.cache[:, :, src], r.cache[:, :, dst])


def test_rows_with_bad_logits_are_told_and_the_others_go_on() -> None:
    r = runner()
    driver = Driver(r)
    good, bad, chunk = driver.add([1, 2, 3]), driver.add([4, 5, 6]), driver.add([7] * 30)
    driver.step(2)
    with torch.inference_mode():
        r.cache[1, 1, bad.table[0]] = float("nan")
    rows = [row_for(chunk, 2, 5, False), row_for(bad, 2, 1, True), row_for(good, 2, 1, True)]
    output = r.execute(Plan(0, rows))
    assert output.bad_rows == [1]
    assert [len(t) for t in output.token_ids] == [0, 0, 1]
    assert output.t_prepare > 0
    assert output.t_forward > 0


def test_a_failed_step_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    r = runner()
    prompt = [9, 8, 7, 6] * 6
    want = Driver(r).generate([prompt], 4)
    driver = Driver(r, seed=1)
    seq = driver.add(prompt)
    forward = r.model.forward
    monkeypatch.setattr(r.model, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        driver.step(1000)
    monkeypatch.setattr(r.model, "forward", forward)
    for _ in range(4):
        driver.step(1000)
    assert [list(seq.tokens[-4:])] == want


@pytest.mark.conformance(108)
def test_samples_do_not_depend_on_batch_chunk_or_preemption() -> None:
    r = runner()
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=5)
    prompts = [[(3 * i + j) % 199 for j in range(10 + 7 * i)] for i in range(5)]

    def run(chunk: int, together: bool, preempt: bool) -> list[list[int]]:
        driver = Driver(r, seed=chunk)
        seqs = [driver.add(p, params) for p in prompts]
        for group in [seqs] if together else [[s] for s in seqs]:
            while todo := [s for s in group if len(s) < s.request.prompt_tokens + 12]:
                driver.step(chunk, todo)
                if preempt and driver.random.random() < 0.2:
                    driver.drop(todo[0], forget=False)
        return [list(s.tokens) for s in seqs]

    want = run(1000, True, False)
    assert run(7, True, False) == want
    assert run(16, False, False) == want
    assert run(9, True, True) == want


# ------------------------------------------------------------------------------------------- budget


def test_a_step_of_as_many_draws_as_tokens_draws_from_the_last_one_alone() -> None:
    """The end of a prompt, two tokens of it, where two samples part."""
    r, said = runner(), []
    for chunks in ((9,), (7, 2), (8, 1)):
        seq = Sequence(len(said), Request(0, list(range(3, 12)), SamplingParams(temperature=0.0, n=2), 0.0))
        seq.table, start = [1, 2], 0
        for n in chunks:
            last = start + n == 9
            output = r.execute(Plan(0, [row_for(seq, start, n, draws=(0, 1) if last else ())]))
            start += n
        said.append(output.token_ids[0])
    assert said[0] == said[1] == said[2] and said[0][0] == said[0][1]


def test_a_chunk_shrinks_with_the_context() -> None:
    cost = StepCost(SMOL)
    assert cost.tokens_within(0) > 10_000  # nothing measured yet: no limit
    cost.observe([512], [512], 0.25)
    budgets = [cost.tokens_within(c) for c in (0, 1000, 4000, 8000)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > 512 > budgets[-1] >= 16
    assert all(b % 16 == 0 for b in budgets)
    for context, n in zip((0, 1000, 4000, 8000), budgets, strict=True):
        work = cost.work(n, n * context + n * n // 2)
        assert work * 0.25 / cost.work(512, 512 * 513 // 2) <= SECONDS * 1.01


def test_the_budget_follows_what_steps_take() -> None:
    cost = StepCost(SMOL)
    cost.observe([64], [64], 5.0)  # the first: compiles, pages in
    cost.observe([64], [64], 0.03)
    fast = cost.tokens_within(0)
    cost.observe([1] * 8, [500] * 8, 9.0)  # decodes say nothing about chunks
    assert cost.tokens_within(0) == fast > 500
    for _ in range(20):
        cost.observe([64], [64], 0.06)
    assert cost.tokens_within(0) < 0.6 * fast


def test_a_step_that_only_waits_does_not_shrink_chunks() -> None:
    """Every step takes 0.3 s whatever it computes, as on a busy machine: chunks of 16 would take 32 of them for 512
    tokens. When that ends, chunks are what they were."""
    cost = StepCost(SMOL)
    cost.observe([64], [64], 0.03)
    quiet = cost.tokens_within(0)
    for _ in range(8):
        cost.observe([1], [100], 0.3)
    for _ in range(30):
        n = cost.tokens_within(0)
        cost.observe([n], [n], 0.3 + n * 0.0005)
    assert 300 <= cost.tokens_within(0) <= 1000
    for _ in range(8):
        cost.observe([1], [100], 0.006)
    for _ in range(20):
        cost.observe([64], [64], 0.03)
    assert abs(cost.tokens_within(0) / quiet - 1) < 0.3


def test_one_step_that_was_held_up_is_no_fixed_time() -> None:
    cost = StepCost(SMOL)
    cost.observe([64], [64], 0.03)
    for seconds in (0.006, 9.0) * 4:
        cost.observe([1], [100], seconds)
    assert cost.tokens_within(0) <= 64 * SECONDS / 0.03


def test_the_runner_keeps_to_the_limit_it_is_given() -> None:
    assert runner().step_budget(512, 0) == 512


def test_a_step_goes_to_the_device_in_one_copy() -> None:
    copies: list[torch.Tensor] = []

    def copy(t: torch.Tensor) -> torch.Tensor:
        copies.append(t)
        return t.clone()

    arrays: list[np.ndarray] = [
        np.arange(5),
        np.zeros(0, np.int64),
        np.arange(3, dtype=np.int32),
        np.ones(7, np.int32),
    ]
    got = packed(arrays, pin=False, copy=copy)
    assert len(copies) == 1
    assert all((t.data_ptr() - got[0].data_ptr()) % 16 == 0 for t in got if len(t))
    for a, t in zip(arrays, got, strict=True):
        assert torch.equal(t, torch.from_numpy(a))


def test_a_gpu_that_is_full_of_pieces_gets_a_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward runs again behind an emptied cache of torch's; what fails twice fails the step."""
    one = runner()
    seq = Sequence(0, Request(0, [1, 2, 3], SamplingParams(temperature=0.0), 0.0))
    seq.table = [1]
    batch, _ = one._rows.apply(Plan(0, [row_for(seq, 0, 3, True)]))
    with torch.inference_mode():
        want = one.model.forward(batch, one.cache)
    forward, left, emptied = one.model.forward, 1, []

    def full(*args: Any) -> torch.Tensor:
        nonlocal left
        left -= 1
        if left >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(*args)

    monkeypatch.setattr(one.model, "forward", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(left))
    with torch.inference_mode():
        with pytest.raises(torch.OutOfMemoryError):
            one._forward(batch)  # a CPU has no pieces
        one.device, left = "cuda", 1
        assert torch.equal(one._forward(batch), want) and emptied == [0]
        left = 2
        with pytest.raises(torch.OutOfMemoryError):
            one._forward(batch)
