"""Small random models and a driver that runs sequences through a TorchRunner without a scheduler."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch

from engine.config import EngineConfig
from engine.files.model_config import ModelConfig, RopeConfig
from engine.model.torch_runner import TorchRunner
from engine.params import SamplingParams
from engine.step.runner import Plan
from engine.step.sequence import Request, Sequence
from tests.engine.rig import row_for

LLAMA = ModelConfig("llama", 199, 64, 112, 2, 4, 2, 16, 512, rms_norm_eps=1e-5, tie_word_embeddings=True)
LLAMA3 = replace(
    LLAMA,
    tie_word_embeddings=False,
    num_kv_heads=1,
    rope=RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, original_max_position=64),
)
LINEAR = replace(LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True, rope=RopeConfig(kind="linear", factor=4.0))
MISTRAL = replace(LLAMA, architecture="mistral", tie_word_embeddings=False, head_dim=32, num_kv_heads=4)
QWEN2 = replace(LLAMA, architecture="qwen2", qkv_bias=True, rms_norm_eps=1e-6)
QWEN3 = replace(LLAMA, architecture="qwen3", qk_norm=True, head_dim=32, tie_word_embeddings=False)
YARN = replace(QWEN3, rope=RopeConfig(1e4, "yarn", 4.0, original_max_position=64))
MODELS = {
    "llama": LLAMA,
    "llama3-rope": LLAMA3,
    "llama-bias-linear-rope": LINEAR,
    "mistral-head-dim": MISTRAL,
    "qwen2": QWEN2,
    "qwen3-untied": QWEN3,
    "qwen3-yarn": YARN,
}

MARGIN = 1e-3
"""Seeds are chosen so that the two best logits differ by more; equality is never loosened."""

CPU64 = EngineConfig(device="cpu", dtype="float64", ops="reference", num_blocks=129, threads=1)


def hf_config(c: ModelConfig) -> Any:
    """The transformers config that says the same."""
    from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

    r = c.rope
    rope: dict[str, Any] = {"rope_type": r.kind, "rope_theta": r.theta}
    if r.kind != "default":
        rope["factor"] = r.factor
    if r.kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = r.original_max_position
    if r.kind == "llama3":
        rope |= {"low_freq_factor": r.low_freq_factor, "high_freq_factor": r.high_freq_factor}
    cls = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    more: dict[str, Any] = (
        {"attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias} if c.architecture == "llama" else {}
    )
    if c.architecture in ("mistral", "qwen2", "qwen3"):
        more["sliding_window"] = None
    return cls[c.architecture](
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        tie_word_embeddings=c.tie_word_embeddings,
        rope_parameters=rope,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **more,
    )


def hf_model(c: ModelConfig, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    """transformers' own model over `weights`. Made without its random initialisation, which takes longer
    than everything else: the rotary buffers are computed all the same."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(hf_config(c), dtype=dtype).eval()
    state = {k: v.to(dtype) for k, v in weights.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert all("lm_head" in m for m in missing), missing
    model.tie_weights()
    return model


@torch.inference_mode()
def random_weights(c: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 weights of the right names and shapes, large enough that logits differ clearly."""
    g = torch.Generator().manual_seed(seed)
    q, kv, h, i = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    out: dict[str, torch.Tensor] = {}

    def linear(name: str, rows: int, cols: int, bias: bool = False) -> None:
        out[f"{name}.weight"] = torch.randn(rows, cols, generator=g) * 2 * cols**-0.5
        if bias:
            out[f"{name}.bias"] = torch.randn(rows, generator=g) * 0.3

    def norm(name: str, n: int) -> None:
        out[f"{name}.weight"] = 1 + 0.2 * torch.randn(n, generator=g)

    linear("model.embed_tokens", c.vocab_size, h)
    for layer in range(c.num_layers):
        p = f"model.layers.{layer}."
        norm(p + "input_layernorm", h)
        norm(p + "post_attention_layernorm", h)
        for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
            linear(f"{p}self_attn.{name}", rows, h, c.qkv_bias)
        linear(f"{p}self_attn.o_proj", h, q, c.o_bias)
        if c.qk_norm:
            norm(p + "self_attn.q_norm", c.head_dim)
            norm(p + "self_attn.k_norm", c.head_dim)
        for name, rows, cols in (("gate_proj", i, h), ("up_proj", i, h), ("down_proj", h, i)):
            linear(f"{p}mlp.{name}", rows, cols, c.mlp_bias)
    norm("model.norm", h)
    if not c.tie_word_embeddings:
        linear("lm_head", c.vocab_size, h)
    return out


class Case:
    """A random model, prompts, and `new` greedy tokens after each with their logits as transformers says."""

    def __init__(self, config: ModelConfig, seed: int, prompts: list[list[int]], new: int) -> None:
        self.config = config
        self.weights = random_weights(config, seed)
        self.hf = hf_model(config, self.weights, torch.float64)
        self.prompts = prompts
        self.new = new
        self.tokens, self.logits = zip(*(self._generate(p) for p in self.prompts), strict=True)

    @torch.inference_mode()
    def _generate(self, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
        ids = torch.tensor([prompt])
        out = self.hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=self.new,
            return_dict_in_generate=True,
            output_logits=True,
        )
        logits = torch.cat(out.logits)
        best = logits.topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > MARGIN, "choose another seed"
        return out.sequences[0, len(prompt) :].tolist(), logits

    def runner(self, config: EngineConfig = CPU64) -> TorchRunner:
        return TorchRunner.from_weights(self.config, dict(self.weights), config)


class Driver:
    """Runs prompts through a runner: random blocks, any chunking, all live sequences in one batch."""

    def __init__(self, runner: TorchRunner, seed: int = 0) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.free = list(range(1, runner.num_blocks))
        self.random.shuffle(self.free)
        self.live: list[Sequence] = []
        self._ids = 0
        self.retired: list[int] = []

    def add(self, prompt: list[int], params: SamplingParams | None = None, branch: int = 0) -> Sequence:
        params = params or SamplingParams(temperature=0.0)
        self._ids += 1
        seq = Sequence(self._ids, Request(self._ids, prompt, params, 0.0), branch)
        self.live.append(seq)
        return seq

    def drop(self, seq: Sequence, forget: bool = True) -> None:
        """Gives its blocks back; with forget=False as a preemption does, to be computed again."""
        self.free += seq.table
        seq.table.clear()
        seq.table_sent = -1
        seq.num_computed = 0
        self.retired.append(seq.seq_id)
        if forget:
            self.live.remove(seq)

    def step(self, chunk: int, only: list[Sequence] | None = None) -> None:
        """One step of every live sequence, at most `chunk` tokens each."""
        rows = []
        for seq in self.live if only is None else only:
            n = min(chunk, len(seq) - seq.num_computed)
            end = seq.num_computed + n
            while len(seq.table) * self.runner.block_size < end:
                seq.table.append(self.free.pop())
            rows.append(row_for(seq, seq.num_computed, n, end == len(seq)))
        output = self.runner.execute(Plan(0, rows, retired=self.retired))
        self.retired = []
        for seq, row, tokens in zip(self.live if only is None else only, rows, output.token_ids, strict=True):
            seq.num_computed = row.start + row.n
            seq.tokens.extend(tokens)

    def generate(
        self, prompts: list[list[int]], n: int, chunk: int = 1 << 20, batch: int = 64
    ) -> list[list[int]]:
        """`n` greedy tokens after each prompt."""
        out = []
        for i in range(0, len(prompts), batch):
            seqs = [self.add(p) for p in prompts[i : i + batch]]
            want = {s.seq_id: len(s) + n for s in seqs}
            while todo := [s for s in seqs if len(s) < want[s.seq_id]]:
                self.step(chunk, todo)
            out += [list(s.tokens[-n:]) for s in seqs]
            for s in seqs:
                self.drop(s)
        return out
