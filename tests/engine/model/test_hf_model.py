"""Other decoders through transformers: the tokens of generate whatever the chunks, hits and preemptions, and
refusals that name what would come out wrong."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.errors import SetupError
from engine.events import PrefixLookup, RequestPreempted
from engine.files.hub import resolve
from engine.files.model_files import ModelFiles
from engine.model import hf_model, torch_runner
from engine.model.hf_model import HfModel
from engine.model.torch_runner import TorchRunner
from engine.ops.base import StepInput
from tests.engine.model.test_exact import NEW, Run, families
from tests.engine.tiny import CPU64, LLAMA, LLAMA3, MARGIN, QWEN3, Case, Driver, hf_config

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,  # a tied random model only repeats itself
}
# The windows are shorter than the prompts and no multiple of a block, the soft-caps low enough to bite.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "sliding_window": 21,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 20.0,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 21, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "phi3": ("Phi3Config", {"sliding_window": 37}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": (
        "Olmo3Config",
        {"sliding_window": 21, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 21, "head_dim": 16}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
}


def small_config(family: str) -> Any:
    name, more = OTHERS[family]
    shared = ("vocab_size", "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    common = {k: v for k, v in COMMON.items() if family != "gpt2" or k in shared}
    return getattr(transformers, name)(**common, **more)


def larger(model: Any, seed: int) -> None:
    """Weights so large that logits differ clearly and attention is sharp."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.copy_(
                    torch.randn(p.shape, generator=g)
                    * (2 if "embed" not in name else 1)
                    * p.shape[-1] ** -0.5
                )
            elif "norm" in name or "ln_" in name:
                p.add_(0.2 * torch.randn(p.shape, generator=g))


@torch.inference_mode()
def generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(out.logits).topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > MARGIN / 10, "choose another seed"
    tokens: list[int] = out.sequences[0, len(prompt) :].tolist()
    return tokens


class HfCase:
    """A random model of a family, prompts, and what transformers' own attention says after each."""

    def __init__(self, family: str, folder: Path, seed: int = 0) -> None:
        self.family = family
        config = small_config(family)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        larger(model, seed)
        model.save_pretrained(folder)
        self.folder = folder
        self.files = resolve(str(folder))
        self.prompts = families(replace(LLAMA, architecture="llama"))
        wide = model.to(torch.float64).eval()
        self.tokens = [generated(wide, p) for p in self.prompts]

    @cache  # noqa: B019 -- lives as long as the module's fixture
    def model(self, dtype: torch.dtype) -> HfModel:
        return hf_model.load(self.files, CPU, dtype, lambda *_: None)

    def runner(self, config: EngineConfig) -> TorchRunner:
        dtype = torch.float64 if config.dtype == "float64" else torch.float32
        return TorchRunner.over(self.model(dtype), config)


@pytest.fixture(scope="module", params=OTHERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HfCase:
    return HfCase(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("chunk", [7, 16, 1000])
def test_tokens_are_those_of_generate_whatever_the_chunking(case: HfCase, chunk: int) -> None:
    assert Driver(case.runner(CPU64), seed=chunk).generate(case.prompts, NEW, chunk) == case.tokens


def test_float32_gives_the_same_tokens(case: HfCase) -> None:
    runner = case.runner(replace(CPU64, dtype="float32", ops="auto"))
    assert Driver(runner).generate(case.prompts[:4], NEW, 33) == case.tokens[:4]


def test_hits_evictions_and_preemptions_change_no_token(case: HfCase) -> None:
    for knobs in ({"max_num_batched_tokens": 40}, {"num_blocks": 19, "max_num_batched_tokens": 33}):
        run = Run(case, **knobs)  # type: ignore[arg-type]
        for i in [*range(len(case.prompts))] * 2:
            run.add(i)
        run.finish()
    assert len(run.events(RequestPreempted)) > 3
    assert sum(e.hit_tokens for e in run.events(PrefixLookup)) > 100  # type: ignore[attr-defined]


@pytest.mark.parametrize("part", ["_mask", "softcap"])
def test_windows_and_soft_caps_bite(case: HfCase, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them other tokens come out: the equalities above would see it."""
    if case.family in {"_mask": ("olmo2", "gpt2"), "softcap": set(OTHERS) - {"gemma2"}}[part]:
        return
    whole = hf_model.attend
    none = {"window" if part == "_mask" else "softcap": None}
    monkeypatch.setattr(hf_model, "attend", lambda *a, **k: whole(*a, **k | none))
    assert Driver(case.runner(CPU64)).generate(case.prompts, NEW) != case.tokens


# ------------------------------------------------------------------- the own decoder against this path


@pytest.mark.parametrize("config", [LLAMA3, QWEN3], ids=lambda c: c.architecture)
def test_the_own_decoder_is_transformers_over_the_same_blocks(config: Any) -> None:
    r = random.Random(0)
    prompts = [[r.randrange(config.vocab_size) for _ in range(n)] for n in (5, 40, 77)]
    case = Case(config, 1, prompts, 8)
    hf_model.register()
    hf = transformers.AutoModelForCausalLM.from_config(hf_config(config), attn_implementation=hf_model.NAME)
    hf.load_state_dict(dict(case.weights), strict=False)
    seen: list[list[torch.Tensor]] = []
    theirs = HfModel(config, hf.to(torch.float64), CPU, torch.float64)
    for runner in (case.runner(), TorchRunner.over(theirs, CPU64)):
        seen.append([])
        forward, kept = runner.model.forward, seen[-1]

        def record(batch: StepInput, cache: Any, forward: Any = forward, kept: Any = kept) -> torch.Tensor:
            kept.append(forward(batch, cache))
            logits: torch.Tensor = kept[-1]
            return logits

        runner.model.forward = record  # type: ignore[method-assign]
        assert Driver(runner).generate(prompts, 8, chunk=13) == list(case.tokens)
    for a, b in zip(*seen, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)  # their norms are float32 whatever the dtype


# ----------------------------------------------------------------------------------------- the build


def test_an_unknown_architecture_goes_through_transformers(tmp_path: Path) -> None:
    case = HfCase("olmo2", tmp_path)
    said: list[str] = []
    config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", num_blocks=64)
    runner = torch_runner.build(config, lambda done, total, what: said.append(what))
    assert runner.ops_name == "transformers"
    assert any(hf_model.NOTICE in what for what in said)
    assert runner.weights_bytes == 4 * sum(p.numel() for p in case.model(torch.float32).hf.parameters())
    assert Driver(runner).generate(case.prompts[:2], NEW, 20) == case.tokens[:2]
    fp8 = torch_runner.build(replace(config, kv_cache_dtype="fp8"), lambda *_: None)
    whole = Driver(fp8).generate(case.prompts[:3], NEW)
    assert Driver(fp8, seed=1).generate(case.prompts[:3], NEW, 7) == whole
    with pytest.raises(SetupError, match=r"--quantization: .* has none"):
        torch_runner.build(replace(config, quantization="int8"), lambda *_: None)


def test_long_rope_keeps_to_lengths_at_which_it_is_constant(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors, "original_max_position_embeddings": 64}
    config = transformers.Phi3Config(
        **COMMON | {"rope_parameters": rope, "original_max_position_embeddings": 64}
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    runner = torch_runner.build(
        EngineConfig(model=str(tmp_path), device="cpu", num_blocks=64), lambda *_: None
    )
    assert runner.max_model_len == 64


BASE = {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", **COMMON}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"vision_config": {"a": 1}}, "GemmaForCausalLM is multimodal"),
        ({"auto_map": {"AutoModel": "x.y"}}, "code of its own"),
        ({"use_bidirectional_attention": True}, "both directions"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention layers"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention layers"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}, "latent"),
        ({"num_kv_shared_layers": 2}, "share or keep no KV"),
        ({"model_type": "mamba"}, "keeps a state.*; take another model; Llama"),
        ({"model_type": "falcon"}, "no way into its attention; take another model; Llama"),
        ({"model_type": "deepseek_v3"}, "MLA.*; take another model; Llama"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
    ],
)
def test_what_would_come_out_wrong_is_refused_by_name(more: dict[str, Any], said: str) -> None:
    with pytest.raises(SetupError, match=said) as e:
        hf_model.refuse(BASE | more)
    assert len(str(e.value)) <= 200


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "quokka", "architectures": ["QuokkaForCausalLM"]},
            "QuokkaForCausalLM: neither kvtop nor",
        ),
        (
            {"model_type": "bloom", "architectures": ["BloomForCausalLM"], "n_layer": 2, "n_head": 2},
            "Bloom.*no way",
        ),
        (
            {
                "model_type": "gpt_oss",
                "architectures": ["GptOssForCausalLM"],
                "layer_types": ["full_attention"] * 2,
                "num_hidden_layers": 2,
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "head_dim": 16,
            },
            "s_aux",
        ),
    ],
    ids=["unknown", "no way in", "sinks"],
)
def test_what_cannot_be_paged_is_refused_by_name(
    config: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_model, "_UNPAGED", {})  # as a model_type of which nothing is known
    whole = COMMON | config
    if whole["model_type"] != "quokka":
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**whole))
        model.save_pretrained(tmp_path)
    else:
        (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        (tmp_path / "config.json").write_text(json.dumps(whole))
    files = ModelFiles("safetensors", "m", tmp_path, (tmp_path / "model.safetensors",), None)
    files = replace(files, config=json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(SetupError, match=said) as e:
        TorchRunner.over(hf_model.load(files, CPU, torch.float32, lambda *_: None), CPU64)
    assert len(str(e.value)) <= 200


def test_masks_and_positions_that_a_config_claims_are_in_the_memory_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-BigCode keeps a mask of n_positions x n_positions bytes; only the config says how many these are."""
    config = transformers.GPTBigCodeConfig(
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        vocab_size=199,
        architectures=["GPTBigCodeForCausalLM"],
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"n_positions": 1 << 17}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    files = ModelFiles("safetensors", "m", tmp_path, (tmp_path / "model.safetensors",), raw)
    monkeypatch.setattr(hf_model, "free_memory", lambda: 8 << 30)
    with pytest.raises(SetupError, match=r"too little memory: weights 16 GiB .* free 8 GiB"):
        hf_model.load(files, CPU, torch.float32, lambda *_: None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", "tensor transformer.h.1.mlp.c_fc.weight is missing"),
        ("a layer too many", r"tensor (transformer\.)?h.2.mlp.c_fc.weight has no place in this config"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(change: str, said: str, tmp_path: Path) -> None:
    """transformers draws a missing one at random and leaves out what it does not expect."""
    model = transformers.AutoModelForCausalLM.from_config(small_config("gpt2"))
    model.config.architectures = ["GPT2LMHeadModel"]
    state = dict(model.state_dict())
    one = state["transformer.h.1.mlp.c_fc.weight"]
    if change == "missing":
        del state["transformer.h.1.mlp.c_fc.weight"]
    else:
        state["transformer.h.2.mlp.c_fc.weight"] = one.clone()
    model.save_pretrained(tmp_path, state_dict=state)
    files = ModelFiles("safetensors", "m", tmp_path, (tmp_path / "model.safetensors",), None)
    files = replace(files, config=json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(SetupError, match=said) as e:
        hf_model.load(files, CPU, torch.float32, lambda *_: None)
    assert len(str(e.value)) <= 200
