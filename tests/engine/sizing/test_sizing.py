"""What a cache takes: the article's numbers to the digit, the known models' weights as published, every rule of
layers against transformers, and the fit of requests against counting one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants, file_download
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from engine.errors import SetupError
from engine.files.hf_config import from_hf
from engine.sizing.kv_shape import KvShape, LayerGroup
from engine.sizing.kv_size import (
    GIB,
    Plan,
    Sizing,
    count_parameters,
    dollars_per_million,
    find,
    known_models,
    load,
    published_format,
    waste,
)
from tests.engine.hub_server import Hub, serve

KIB, MIB = 1 << 10, 1 << 20
RUN_HERE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")


def sized(name: str, **more: int) -> Sizing:
    return Sizing(KvShape.from_config(known_models()[name].config), **more)


def report(name: str, **plan: Any) -> dict[str, Any]:
    model = known_models()[name]
    return Plan(**plan).report(name, model.config, sized(name))


# ----------------------------------------------------------------------------- the article, section 2


@pytest.mark.parametrize(
    ("name", "a_token"),
    [
        ("llama-3.1-70b", 327_680),  # 320 KiB
        ("qwen3-235b-a22b", 192_512),  # 188 KiB, where the article says 200 KB
        ("minimax-m2.5", 253_952),  # 248 KiB
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-405b", 516_096),
        ("qwen3-0.6b", 114_688),
        ("smollm2-135m", 23_040),
        ("mistral-7b", 131_072),
        ("deepseek-v3", 70_272),  # 61 layers x (512 + 64) x 2 bytes, once and not twice
    ],
)
def test_bytes_of_a_token(name: str, a_token: int) -> None:
    size = sized(name)
    assert size.bytes_per_token == size.bytes_per_token_past_window == a_token
    assert size.bytes_per_block == 16 * a_token
    assert sized(name, value_bytes=1).bytes_per_token == a_token // 2  # FP8 halves it


def test_contexts_of_the_70b() -> None:
    size = sized("llama-3.1-70b")
    assert size.request_bytes(4096) == 1.25 * GIB
    assert size.request_bytes(32_768) == 10 * GIB
    assert size.request_bytes(131_072) == 40 * GIB
    assert size.full_bytes_per_token == 8 * size.bytes_per_token  # 64 heads instead of 8


def test_memory_for_kv() -> None:
    """80 GB with the 70B in INT4 and 3 GB overhead: the article's 42 GB, from the exact count of parameters."""
    reported = report("llama-3.1-70b", memory=80 * 10**9, weights="int4", overhead=3 * 10**9)
    assert reported["weights"]["bytes"] == 35_276_853_248
    assert reported["memory"]["kv_bytes"] == 41_723_146_752
    assert round(reported["memory"]["kv_bytes"] / 1e9) == 42
    taken = report("llama-3.1-70b", weights=35 * 10**9, memory=80 * 10**9, overhead=3 * 10**9)
    assert taken["memory"]["kv_bytes"] == 42 * 10**9
    assert "format" not in taken["weights"]


def test_requests_that_fit() -> None:
    """The article counts its 42 GB as GiB: 33 slots of 4K, 67 of 2,048, and in blocks 268 of 500 tokens where it
    says about 280 (500 tokens are 31.25 blocks, so 32)."""
    size, kv = sized("llama-3.1-70b"), 42 * GIB
    assert size.requests_naive(kv, 4096) == 33
    assert size.requests_naive(kv, 2048) == 67
    assert size.requests_paged(kv, 500) == 268
    assert kv // size.bytes_per_block == 8601
    assert size.requests_naive(42 * 10**9, 4096) == 31
    assert size.requests_paged(42 * 10**9, 500) == 250
    reported = report("llama-3.1-70b", weights="int4")["contexts"]
    assert reported["4096"] == {
        "bytes": 1_342_177_280,
        "requests_naive": 35,
        "requests_paged": 282,
        "naive_used": 0.12207,
    }


def test_dollars() -> None:
    """4 against 18 dollars for 36 against 8 users: one price and one pace give both."""
    assert dollars_per_million(10.368, 8, 0.05) == pytest.approx(18, rel=1e-12)
    assert dollars_per_million(10.368, 36, 0.05) == pytest.approx(4, rel=1e-12)
    row = report("llama-3.1-70b", weights="int4", gpu_hour=2.5)["contexts"]["4096"]
    assert row["dollars_naive"] == pytest.approx(2.5e6 / (35 * 20 * 3600), abs=1e-6)
    assert row["dollars_paged"] == pytest.approx(2.5e6 / (282 * 20 * 3600), abs=1e-6)


# ----------------------------------------------------------------------------- the article, section 4


def test_the_walk() -> None:
    """1,024 + 10 tokens: 65 blocks with 10 of 16 slots in the last; 0.6 % wasted against 49.5 %."""
    blocks = -(-1034 // 16)
    assert (blocks, 1034 - 64 * 16) == (65, 10)
    assert f"{waste(1034, blocks * 16):.1%}" == "0.6%"
    assert f"{waste(1034, 2048):.1%}" == "49.5%"
    assert 85 < waste(1034, 2048) / waste(1034, blocks * 16) < 86  # the article's 80 x


def test_waste_of_the_last_block() -> None:
    assert sized("llama-3.1-70b").last_block_waste == 15 * 320 * KIB  # 4.7 MiB; the article says 4.8 KB
    assert sized("llama-3.1-70b", block_size=256).last_block_waste == 255 * 320 * KIB  # 80 MiB, not 80 KB
    assert sized("llama-3.1-70b", block_size=1).last_block_waste == 0


def test_chunks_and_prefixes() -> None:
    """Sections 6 and 7: a chunk of 2,048 holds 640 MiB where 100,000 tokens hold 30.5 GiB; 2,000 tokens are
    125 blocks and 625 MiB."""
    size = sized("llama-3.1-70b")
    assert report("llama-3.1-70b")["chunk"] == {"tokens": 2048, "bytes": 640 * MIB}
    assert round(size.request_bytes(100_000) / GIB, 1) == 30.5
    assert size.paged_bytes(2000) == 125 * size.bytes_per_block == 625 * MIB


# ------------------------------------------------------------------------------------ known models


@pytest.mark.parametrize("name", known_models())
def test_weights_are_those_the_hub_tells(name: str) -> None:
    counted = count_parameters(known_models()[name].config)
    assert counted is not None
    assert counted.total == known_models()[name].parameters


def test_active_parameters() -> None:
    """All but the experts that a token is not sent to."""
    counted = {n: count_parameters(m.config) for n, m in known_models().items()}
    idle = {n: c.total - c.active for n, c in counted.items() if c is not None}
    assert idle["deepseek-v3"] == 58 * (256 - 8) * 3 * 7168 * 2048
    assert idle["qwen3-235b-a22b"] == 94 * (128 - 8) * 3 * 4096 * 1536
    assert idle["minimax-m2.5"] == 62 * (256 - 8) * 3 * 3072 * 1536
    assert idle["llama-3.1-70b"] == 0


@pytest.mark.parametrize(
    "name", [n for n, m in known_models().items() if m.config["architectures"][0] in RUN_HERE]
)
def test_decoders_that_run_here_are_sized_alike(name: str) -> None:
    config = known_models()[name].config
    model = from_hf(config)
    shape, reported = KvShape.of(model), KvShape.from_config(config)
    assert (reported.groups, reported.heads, reported.kv_heads, reported.head_dim) == (
        shape.groups,
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
    )
    values = model.num_layers * model.num_kv_heads * model.head_dim * 2  # K and V
    assert Sizing(reported).bytes_per_token == values * 2


def test_names_and_hub_ids() -> None:
    assert (
        find("Meta-Llama/llama-3.1-70b-instruct") is find("LLAMA-3.1-70B") is known_models()["llama-3.1-70b"]
    )
    assert find("llama") is None
    assert load("qwen/qwen3-8b")[0] == "qwen3-8b"


# ------------------------------------------------------------------------------------- rules of layers


def windows(shape: KvShape) -> dict[int | None, int]:
    return {g.window: g.layers for g in shape.groups}


def test_gemma_3_holds_at_most_the_window() -> None:
    shape = KvShape.from_config(known_models()["gemma-3-27b"].config)
    assert windows(shape) == {None: 10, 1024: 52}
    size = Sizing(shape)
    assert size.bytes_per_token == 62 * 16 * 128 * 2 * 2 == 507_904
    assert size.bytes_per_token_past_window == 10 * 16 * 128 * 2 * 2 == 81_920
    assert size.request_bytes(1024) == 1024 * 507_904
    assert size.request_bytes(131_072) == 131_072 * 81_920 + 1024 * (507_904 - 81_920)
    # the window lies across 65 blocks of 16 tokens unless it begins with one
    assert size.paged_bytes(131_072) == 131_072 * 81_920 + 65 * 16 * (507_904 - 81_920)
    reported = report("gemma-3-27b")
    assert (reported["window"], reported["window_layers"]) == (1024, 52)
    assert "num_blocks" not in reported


@given(
    tokens=st.integers(0, 5000),
    window=st.none() | st.integers(1, 3000),
    block=st.sampled_from([1, 2, 16, 256]),
)
def test_blocks_of_a_window(tokens: int, window: int | None, block: int) -> None:
    """At any length the blocks under the window are counted one by one, and are never more than reported."""
    shape = KvShape("x", "multi-head", (LayerGroup(1, 1, 1, window),), 1, 1, 1, 1, None)
    first = 0 if window is None else max(0, tokens - window)
    touched = len({t // block for t in range(first, tokens)})
    assert shape.held(tokens) == tokens - first
    assert touched * block <= shape.slots(tokens, block)
    if window is None or tokens <= window:
        assert shape.slots(tokens, block) == touched * block
    else:
        most = max(len({t // block for t in range(n - window, n)}) for n in range(window, window + block))
        assert shape.slots(tokens, block) == block * min(most, -(-tokens // block))


TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
}
LATENT = {
    **TINY,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("llama", TINY),
    ("llama", {**TINY, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {**TINY, "sliding_window": 512}),
    ("mixtral", {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2", {**TINY, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 3}),
    ("qwen3", {**TINY, "head_dim": 32, "attention_bias": True}),
    (
        "qwen3_moe",
        {**TINY, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    (
        "qwen3_moe",
        {
            **TINY,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 48,
        },
    ),
    ("gemma2", {**TINY, "head_dim": 32, "sliding_window": 256}),
    ("gemma3_text", {**TINY, "head_dim": 32, "sliding_window": 256}),
    ("minimax_m2", {**TINY, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2}),
    ("deepseek_v2", LATENT),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
]


@pytest.mark.parametrize(("kind", "keys"), FAMILIES, ids=[f"{k}-{i}" for i, (k, _) in enumerate(FAMILIES)])
def test_a_family_is_counted_as_transformers_builds_it(kind: str, keys: dict[str, Any]) -> None:
    """From the few keys of a config.json as well as from all of them that transformers writes."""
    config = AutoConfig.for_model(kind, **keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    total += sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    for said in ({"model_type": kind, **keys}, config.to_dict()):
        counted = count_parameters(said)
        assert counted is not None
        assert counted.total == total
        assert counted.active <= counted.total
        assert windows(KvShape.from_config(said)) == _windows_of(config)


def _windows_of(config: Any) -> dict[int | None, int]:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = getattr(config, "sliding_window", None)
        return {window: config.num_hidden_layers}
    named = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    return {w: named.count(w) for w in named}


def test_where_transformers_assumes_a_key() -> None:
    """Published Gemma 3 configs leave most keys out."""
    said = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 12}}
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=12)
    shape = KvShape.from_config(said)
    assert windows(shape) == _windows_of(config)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (8, 4, 256)
    assert shape.max_position == config.max_position_embeddings


@pytest.mark.parametrize(
    ("config", "values", "attention"),
    [
        ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}, 18_432, "multi-head"),
        (
            {"model_type": "gpt_bigcode", "n_layer": 2, "n_head": 8, "n_embd": 64, "multi_query": True},
            32,
            "multi-query",
        ),
        (
            {
                "model_type": "falcon",
                "num_hidden_layers": 2,
                "num_attention_heads": 8,
                "hidden_size": 64,
                "num_kv_heads": 4,
                "new_decoder_architecture": True,
            },
            128,
            "grouped-query",
        ),
        ({**TINY, "head_dim": 24, "v_head_dim": 16}, 7 * 2 * 40, "grouped-query"),
        (
            {**TINY, "layer_types": ["full_attention", "linear_attention"] * 3 + ["mamba"]},
            3 * 64,
            "grouped-query",
        ),
        ({**TINY, "num_kv_shared_layers": 3}, 4 * 64, "grouped-query"),
    ],
)
def test_other_spellings(config: dict[str, Any], values: int, attention: str) -> None:
    shape = KvShape.from_config(config)
    assert (shape.values, shape.attention) == (values, attention)


def test_chunked_layers() -> None:
    shape = KvShape.from_config(
        {**TINY, "model_type": "llama4_text", "num_hidden_layers": 8, "attention_chunk_size": 128}
    )
    assert windows(shape) == {None: 2, 128: 6}


def test_layers_that_keep_nothing_are_told() -> None:
    config = {**TINY, "layer_types": ["full_attention"] * 2 + ["linear_attention"] * 5}
    reported = Plan(weights=GIB).report("x", config, Sizing(KvShape.from_config(config)))
    assert reported["holding_layers"] == 2
    assert "5 layers keep nothing" in reported["notes"][0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "lacks num_hidden_layers"),
        ({"num_attention_heads": "4"}, "must be int"),
        ({"num_attention_heads": 3}, "no multiple"),
        ({"hidden_size": 65}, "no multiple"),
        ({"num_hidden_layers": 1 << 20}, "no model"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 7 layers"),
        ({"layer_types": ["telepathy"] * 7}, "telepathy"),
        ({"layer_types": ["sliding_attention"] * 7}, "lacks sliding_window"),
        ({"model_type": "novel", "sliding_window": 128}, "add layer_types"),
        ({"num_kv_shared_layers": 7}, "cannot be"),
        ({"is_encoder_decoder": True}, "second cache"),
        ({"attn_layer_period": 8}, "state-space"),
        ({"kv_lora_rank": 16}, "lacks qk_rope_head_dim"),
    ],
)
def test_what_cannot_be_sized_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words) as error:
        KvShape.from_config({**TINY, **change})
    assert len(str(error.value)) <= 200


# ------------------------------------------------------------------------------------------- plans


def test_weights_as_published() -> None:
    assert published_format({}) == "bf16"
    assert published_format({"quantization_config": {"quant_method": "gptq", "bits": 4}}) == "int4"
    assert published_format({"quantization_config": {"quant_method": "mxfp4"}}) is None
    assert report("deepseek-v3", memory=8 * 80 * GIB)["weights"]["bytes"] == 671_026_419_200


def test_a_family_that_nobody_counted() -> None:
    """Its cache is exact all the same; what depends on the weights is absent until they are reported."""
    config = {**TINY, "model_type": "novel"}
    size = Sizing(KvShape.from_config(config))
    reported = Plan().report("novel", config, size)
    assert reported["contexts"]["4096"] == {"bytes": 4096 * size.bytes_per_token}
    assert "kv_bytes" not in reported["memory"]
    assert "--weights SIZE" in reported["notes"][0]
    assert Plan(weights=GIB).report("novel", config, size)["memory"]["kv_bytes"] == 76 * GIB


def test_weights_that_do_not_fit() -> None:
    reported = report("llama-3.1-70b", gpu_hour=2.5)
    assert reported["memory"]["kv_bytes"] == reported["contexts"]["4096"]["requests_paged"] == 0
    assert "dollars_paged" not in reported["contexts"]["4096"]
    assert "more than there are" in reported["notes"][0]


@given(
    kv=st.integers(0, 1 << 24),
    tokens=st.integers(1, 600),
    groups=st.lists(st.tuples(st.integers(1, 3), st.none() | st.integers(1, 300)), min_size=1, max_size=2),
    block=st.sampled_from([1, 4, 16]),
)
def test_one_more_request_never_fits(
    kv: int, tokens: int, groups: list[tuple[int, int | None]], block: int
) -> None:
    shape = KvShape("x", "multi-head", tuple(LayerGroup(n, 6, 6, w) for n, w in groups), 6, 1, 1, 3, None)
    size = Sizing(shape, block_size=block)
    naive, paged = size.requests_naive(kv, tokens), size.requests_paged(kv, tokens)
    assert naive * size.request_bytes(tokens) <= kv < (naive + 1) * size.request_bytes(tokens)
    free = kv - size.bytes_per_block
    assert paged * size.paged_bytes(tokens) <= max(0, free)
    assert (paged + 1) * size.paged_bytes(tokens) > free


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": 0},
        {"overhead": -1},
        {"avg_tokens": 0},
        {"contexts": (0,)},
        {"chunk": 0},
        {"gpu_hour": 0.0},
        {"gpu_hour": float("nan")},
        {"itl": 0.0},
    ],
)
def test_plans_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match="--"):
        Plan(**wrong)
    with pytest.raises(SetupError, match="--weights int3"):
        report("llama-3.1-8b", weights="int3")
    with pytest.raises(SetupError, match="--block-size"):
        sized("llama-3.1-8b", block_size=24)


# --------------------------------------------------------------------------------------- where from


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with serve() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
        yield running


def test_only_the_config_is_fetched(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "config.json").write_text(json.dumps(TINY))
    (repo / "model.safetensors").write_bytes(b"not read")
    hub.repos["org/tiny"] = repo
    assert load("org/tiny") == ("org/tiny", TINY)
    assert {name for _, name, _ in hub.log} == {"config.json"}
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert load("org/tiny")[1] == TINY  # without a network the copy will do
    with pytest.raises(SetupError, match="no network"):
        load("org/other")


def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    hub.repos["org/empty"] = tmp_path / "empty"
    with pytest.raises(SetupError, match="has no config"):
        load("org/empty")
    with pytest.raises(SetupError, match="no model org/nothing"):
        load("org/nothing")


def test_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    assert load(str(folder)) == load(str(folder / "config.json")) == ("my-model", TINY)
    (folder / "config.json").write_text("[")
    with pytest.raises(SetupError, match="not valid JSON"):
        load(str(folder))
    with pytest.raises(SetupError, match=r"did you mean llama-3.1-70b"):
        load("llama-3.1-7b")
    with pytest.raises(SetupError, match="kvtop size list"):
        load("./nothing.json")
    with pytest.raises(SetupError, match=r"path|no model"):
        load("\0")
