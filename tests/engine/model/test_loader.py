"""Weights out of safetensors: what transformers saved, whole and in parts, and files that lie."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import SetupError
from engine.files import hub, model_files
from engine.files.safetensors_file import read_header
from engine.model import load_weights
from tests.engine.saved_models import save


@pytest.mark.parametrize("shards", [None, "60KB"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_what_transformers_saved(family: str, tied: bool, shards: str | None, tmp_path: Path) -> None:
    model = save(tmp_path, family, tied=tied, shards=shards)
    files = hub.resolve(str(tmp_path))
    assert (len(files.weights) > 2) == bool(shards)
    loaded = load_weights.load(files)
    want = model.state_dict()
    assert ("lm_head.weight" in loaded.weights) != tied
    assert set(loaded.weights) | {"lm_head.weight"} == set(want)
    for name, tensor in loaded.weights.items():
        assert torch.equal(tensor, want[name]), name
    assert loaded.config.eos_token_ids == (1, 2)
    assert loaded.config.head_dim == (32 if family == "Qwen3" else 16)


def test_biases_dtype_and_progress(tmp_path: Path) -> None:
    model = save(tmp_path, "Llama", attention_bias=True, mlp_bias=True)
    reports: list[tuple[int, int]] = []
    loaded = load_weights.load(
        hub.resolve(str(tmp_path)),
        dtype=torch.bfloat16,
        progress=lambda done, total, _: reports.append((done, total)),
    )
    bias = "model.layers.1.self_attn.o_proj.bias"
    assert torch.equal(loaded.weights[bias], model.state_dict()[bias].bfloat16())
    assert all(tensor.dtype == torch.bfloat16 for tensor in loaded.weights.values())
    assert reports[-1] == (reports[-1][1],) * 2
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)


def test_a_base_model_without_its_head(tmp_path: Path) -> None:
    """Names without "model.": what saving only the decoder gives."""
    model = save(tmp_path, "Qwen2", tied=True)
    save_file(model.model.state_dict(), tmp_path / "model.safetensors")
    loaded = load_weights.load(hub.resolve(str(tmp_path)))
    assert torch.equal(loaded.weights["model.norm.weight"], model.model.norm.weight)


Change = Callable[[Path, dict[str, torch.Tensor]], None]


def drop(path: Path, weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path)


def reshape(path: Path, weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name].T.contiguous()
    save_file(weights, path)


def add_layer(path: Path, weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.2.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].clone()
    save_file(weights, path)


def add_bias(path: Path, weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)
    save_file(weights, path)


def as_int8(path: Path, weights: dict[str, torch.Tensor]) -> None:
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, path)


def truncate(path: Path, weights: dict[str, torch.Tensor]) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop, "model.layers.1.mlp.up_proj.weight is missing"),
        (add_layer, "model.layers.2.mlp.up_proj.weight has no place in the 2 layers"),
        (add_bias, "model.layers.1.self_attn.q_proj.bias has no place"),
        (reshape, "k_proj.weight is [64, 32], config says [32, 64]"),
        (as_int8, "model.norm.weight is stored as I8"),
        (truncate, "truncated"),
    ],
)
def test_damaged_models(change: Change, words: str, tmp_path: Path) -> None:
    save(tmp_path, "Llama")
    path = tmp_path / "model.safetensors"
    change(path, {name: tensor.clone() for name, tensor in load_file(path).items()})
    with pytest.raises(SetupError, match=re.escape(words)) as error:
        load_weights.load(hub.resolve(str(tmp_path)))
    assert len(str(error.value)) <= 200


def test_what_old_files_keep_in_a_layer_without_need_is_no_fault(tmp_path: Path) -> None:
    save(tmp_path, "Llama")
    path = tmp_path / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, path)
    assert (
        "model.layers.0.self_attn.rotary_emb.inv_freq"
        not in load_weights.load(hub.resolve(str(tmp_path))).weights
    )


def test_too_little_memory_is_said_before_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, "Llama")
    stored = (tmp_path / "model.safetensors").stat().st_size
    monkeypatch.setattr(load_weights, "free_memory", lambda: stored // 2 + 5000)
    with pytest.raises(SetupError, match=r"too little memory: the weights of .* take .* are free"):
        load_weights.load(hub.resolve(str(tmp_path)))
    load_weights.load(hub.resolve(str(tmp_path)), dtype=torch.bfloat16)


def lie(header: Any, body: int = 16) -> bytes:
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + bytes(body)


def tensor(shape: Any = (4,), offsets: Any = (0, 16), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "the file has 0"),
        (b"\x10\0\0", "the file has 3"),
        (struct.pack("<Q", 2**63) + bytes(64), f"claims {2**63} bytes"),
        (struct.pack("<Q", 65) + bytes(64), "claims 65 bytes"),
        (struct.pack("<Q", 8) + b"nonsense", "is not JSON"),
        (struct.pack("<Q", 60_000) + b"[" * 60_000, "is not JSON"),
        (lie([1]), "no JSON object"),
        (lie({"w": 3}), "w has no dtype"),
        (lie({"w": tensor(dtype=4)}), "w has no dtype"),
        (lie({"w": tensor(offsets=[0, 2**63])}), "w lies outside the file"),
        (lie({"w": tensor(offsets=[-4, 12])}), "w lies outside the file"),
        (lie({"w": tensor(offsets=[16, 0])}), "w lies outside the file"),
        (lie({"w": tensor(shape=[2**62, 4])}), "impossible shape"),
        (lie({"w": tensor(shape=[-4])}), "impossible shape"),
        (lie({"w": tensor(shape=["4"])}), "impossible shape"),
        (lie({"w": tensor(shape=[2**40, 2**40])}), "which its shape contradicts"),
        (lie({"w": tensor(shape=[5])}), "which its shape contradicts"),
        (lie({"w": tensor(), "v": tensor(shape=[1], offsets=[8, 12])}), "w and v overlap"),
    ],
)
def test_headers_that_lie(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(SetupError, match=re.escape(words)) as error:
        read_header(path)
    assert len(str(error.value)) <= 200


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    path = folder / model_files.INDEX
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def test_index_that_names_what_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, "Llama", shards="60KB")
    norm = "model.norm.weight"
    shards = sorted(tmp_path.glob("model-*.safetensors"))

    def elsewhere(weight_map: dict[str, str]) -> None:
        weight_map[norm] = next(path.name for path in shards if path.name != weight_map[norm])

    rewrite_index(tmp_path, elsewhere)
    with pytest.raises(SetupError, match=r"the index says that model\.norm\.weight is in"):
        load_weights.load(hub.resolve(str(tmp_path)))
    rewrite_index(tmp_path, lambda weight_map: weight_map.update({norm: "../../etc/x.safetensors"}))
    with pytest.raises(SetupError, match=r"names '\.\./"):
        hub.resolve(str(tmp_path))
    rewrite_index(tmp_path, lambda weight_map: weight_map.update({norm: "model-9.safetensors"}))
    with pytest.raises(SetupError, match=r"names model-9\.safetensors, which is missing"):
        hub.resolve(str(tmp_path))


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    def fails(words: str) -> None:
        with pytest.raises(SetupError, match=re.escape(words)) as error:
            hub.resolve(str(tmp_path))
        assert len(str(error.value)) <= 200

    fails("has no config.json")
    (tmp_path / "config.json").write_text("{")
    fails("is not valid JSON")
    (tmp_path / "config.json").write_text("[" * 100_000)
    fails("is not valid JSON")
    (tmp_path / "config.json").write_text("[]")
    fails("must hold a JSON object, not list")
    (tmp_path / "config.json").write_text("{}")
    fails("has no model.safetensors")
    (tmp_path / model_files.INDEX).write_text("{}")
    fails("has no weight_map")
    (tmp_path / "config.json").unlink()
    (tmp_path / "a.gguf").touch()
    assert hub.resolve(str(tmp_path)).kind == "gguf"
    (tmp_path / "b.gguf").touch()
    fails("holds 2 .gguf files")
