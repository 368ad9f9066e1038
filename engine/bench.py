"""Speed of the engine on this machine, compared with the bandwidth of its memory.

Measures decode at 1 and 8 sequences, a prefill of 1,000 tokens, and the first token with and without the cache. It runs
the real Engine and reads the same events as every other reader. Decode rates are medians over steps. GB/s count the
weights and KV that a step must read; the part is that of the read bandwidth of all threads together.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import SetupError
from engine.events import EngineStarted, RequestFinished, StepBatch, StepCompleted
from engine.files.model_files import Progress
from engine.loaded import Built
from engine.machine import cores
from engine.model.torch_runner import choose
from engine.params import SamplingParams
from engine.start import build

PREFIX = 2000
"""Tokens of the shared prefix whose first token is timed cold and cached."""
PREFILL = 1000
DECODE = 64
"""Steps of a decode measurement; prompts before it are as long."""
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure. gb_s: gigabytes per second read for it; of_limit: their part of the bandwidth."""

    work: str
    value: float
    unit: str
    gb_s: float | None = None
    of_limit: float | None = None


def main(config: EngineConfig, *, as_json: bool = False) -> int:
    """`kvtop bench`: measures and prints. Raises SetupError as a start does."""
    rows = []
    if not as_json:
        print(f"{'work':<34}{'':>12}{'':>8}{'GB/s':>9}{'of the bandwidth':>18}")
    for m in measure(config):
        rows.append(asdict(m))
        if not as_json:
            gb, part = ("" if v is None else f"{v:{f}}" for v, f in ((m.gb_s, ".1f"), (m.of_limit, ".0%")))
            print(f"{m.work:<34}{m.value:>12,.1f} {m.unit:<7}{gb:>9}{part:>18}", flush=True)
    if as_json:
        json.dump({"measures": rows}, sys.stdout)
        print()
    return 0


def measure(config: EngineConfig) -> Iterator[Measure]:
    """All measurements, one after another, on one engine that is started and stopped here."""
    bandwidth = read_bandwidth(config)
    yield Measure("read bandwidth, all threads", bandwidth / 1e9, "GB/s", bandwidth / 1e9, 1.0)
    bench = Bench(config)
    try:
        for sequences in (1, 8):
            rate, read = bench.decode(sequences)
            yield Measure(f"decode, {sequences} at once", rate, "tok/s", read / 1e9, read / bandwidth)
        yield Measure(f"prefill, {PREFILL:,} tokens", bench.prefill(), "tok/s")
        cold, hit = bench.first_token()
        yield Measure(f"first token, {PREFIX:,} tokens cold", cold * 1000, "ms")
        yield Measure(f"first token, {PREFIX:,} tokens cached", hit * 1000, "ms")
        yield Measure("cold over cached", cold / hit, "x")
    finally:
        bench.close()


def read_bandwidth(config: EngineConfig) -> float:
    """Bytes per second that a sum over 512 MiB reads with all threads: best of seven.

    It runs in a thread of its own, whose OpenMP team ends with it: with a second team libgomp lets no thread spin at a
    barrier, which would make the engine's small steps half as fast.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_read_bandwidth, config).result()


def _read_bandwidth(config: EngineConfig) -> float:
    device, _ = choose(config)
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(config.threads or cores())
    try:
        data = torch.ones(128 << 20, device=device)
        data.sum().item()
        best = min(_seconds(lambda: data.sum().item()) for _ in range(7))
    finally:
        torch.set_num_threads(before)
    return data.nbytes / best


def _seconds(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


class Bench:
    """A started engine and its batches. Raises SetupError if the start fails or the model is too small."""

    def __init__(self, config: EngineConfig) -> None:
        self._batches: list[StepBatch] = []
        self._left = 0
        """Requests of the present run that have not ended."""
        self._done = threading.Event()
        self._random = random.Random(0)
        self._salts = 0
        self._vocab = 0
        self.engine = Engine(replace(config, seed=0), build=self._build, device_interval=0)
        self.engine.subscribe(self._sink)
        self.engine.start()
        self.engine.wait_ready()
        self.started = next(e for b in self._batches for e in b.events if isinstance(e, EngineStarted))
        need = PREFIX + 3 * self.started.block_size
        if self.started.max_model_len < need:
            self.close()
            raise SetupError(f"bench needs {need} tokens of context, there are {self.started.max_model_len}")

    def close(self) -> None:
        """Stops the engine."""
        self.engine.stop()

    def decode(self, sequences: int) -> tuple[float, float]:
        """Tokens per second of this number of sequences, and bytes per second read: medians over steps."""
        batches = self.run([self.prompt(DECODE) for _ in range(sequences)], DECODE + 8)
        steps = [(b.t, e) for b in batches for e in b.events if isinstance(e, StepCompleted)]
        full = [
            t - before
            for (before, _), (t, e) in pairwise(steps)
            if e.decode_tokens == sequences and not e.prefill_tokens
        ]
        step = statistics.median(full[len(full) // 4 :])  # the first ones still choose their threads
        s = self.started
        kv = sequences * (1.5 * DECODE) * s.bytes_per_block / s.block_size
        return sequences / step, (s.weights_bytes + kv) / step

    def prefill(self) -> float:
        """Prompt tokens per second, the first token's sampling included: best of three."""
        return max(PREFILL / self.ttft(self.prompt(PREFILL)) for _ in range(REPEATS))

    def first_token(self) -> tuple[float, float]:
        """Seconds to the first token after a prefix of PREFIX tokens, cold and cached: medians."""
        block = self.started.block_size
        prefix = self.prompt(PREFIX // block * block)
        cold, hit = [], []
        for _ in range(REPEATS):
            self._salts += 1
            salt = f"bench {self._salts}"
            cold.append(self.ttft(prefix + self.prompt(block), salt))
            hit.append(self.ttft(prefix + self.prompt(block), salt))
        return statistics.median(cold), statistics.median(hit)

    def prompt(self, tokens: int) -> list[int]:
        """Random token ids; the ends of a vocabulary hold bytes and special tokens."""
        vocab = self._vocab
        return [self._random.randrange(vocab // 10, vocab * 9 // 10) for _ in range(tokens)]

    def ttft(self, prompt: list[int], salt: str | None = None) -> float:
        """Seconds from submission to the first token."""
        batches = self.run([prompt], 1, salt)
        (end,) = [e for b in batches for e in b.events if isinstance(e, RequestFinished)]
        assert end.timings.t_first_token is not None
        return end.timings.t_first_token - end.timings.t_arrival

    def run(self, prompts: list[list[int]], tokens: int, salt: str | None = None) -> list[StepBatch]:
        """Batches from submission to the last finish. Raises RuntimeError if a request fails."""
        first = len(self._batches)
        self._done.clear()
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.engine.pause()  # so that they start together
        self._left = len(prompts)
        for p in prompts:
            self.engine.submit(p, params, salt=salt)
        self.engine.resume()
        if not self._done.wait(600):
            raise RuntimeError("bench: no end after ten minutes")
        batches = self._batches[first:]
        for e in (e for b in batches for e in b.events if isinstance(e, RequestFinished)):
            if e.reason != "length":
                raise RuntimeError(f"bench: a request ended with {e.reason}: {e.error}")
        return batches

    def _sink(self, batch: StepBatch) -> None:
        self._batches.append(batch)
        ended = sum(isinstance(e, RequestFinished) for e in batch.events)
        self._left -= ended
        if ended and not self._left:
            self._done.set()

    def _build(self, config: EngineConfig, progress: Progress) -> Built:
        built = build(config, progress)
        self._vocab = built.runner.vocab_size
        return built
