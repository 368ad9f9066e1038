"""A profiled step of the Triton ops: the same logits bit for bit, every operation timed once."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.model.decoder import Decoder
from engine.ops.nvidia.triton import TritonOps
from engine.ops.profiling.roofline import Roofline
from engine.ops.profiling.step_profile import Profiler
from tests.engine.ops.test_profile import CPU, NAMES, Steps, blank, step
from tests.engine.tiny import LLAMA3, random_weights


def test_logits_are_those_of_any_forward() -> None:
    c = replace(LLAMA3, num_layers=1)
    ops = TritonOps(CPU, torch.float32, c, fp8_kv=True)
    model, batch, cache = Decoder(c, random_weights(c), ops, 64), step([(1, 9), (2, 3)]), blank(c, ops, True)
    profiler = Profiler(model, watch=Steps(), roof=Roofline(None, None))
    with torch.inference_mode():
        plain = model.forward(batch, cache)
        assert profiler.begin(batch)
        assert torch.equal(profiler.forward(batch, cache), plain)
    (reported,) = profiler.take()
    assert reported.names == NAMES
    assert reported.seconds == [1.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    token = c.num_kv_heads * 2 * (c.head_dim + 4)
    assert reported.bytes[4] == 12 * token + 2 * 3 * c.num_heads * c.head_dim * 4
