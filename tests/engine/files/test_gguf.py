"""The GGUF reader: exact on good files, one line and no time or memory on bad ones."""

from __future__ import annotations

import re
import struct
import threading
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.errors import SetupError
from engine.files import gguf_file
from engine.files.gguf_quants import LAYOUTS, dequantise
from engine.files.model_files import ModelFiles
from engine.model import load_weights
from tests.engine.gguf_bytes import header, padded, text, value, whole

HUGE = 2**63
F32 = 0


@pytest.mark.parametrize("kind", sorted(LAYOUTS))
def test_numbers_are_the_gguf_packages(kind: int) -> None:
    """Any bytes at all, NaN and infinity included."""
    layout = LAYOUTS[kind]
    raw = np.random.default_rng(kind).integers(0, 256, (6, 3 * layout.size), dtype=np.uint8)
    got = np.empty((6, 3 * layout.values), np.float32)
    with np.errstate(all="ignore"):
        dequantise(raw, kind, got)
        want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(kind)).astype(np.float32)
    np.testing.assert_array_equal(got, want.reshape(got.shape))


def test_sizes_are_the_gguf_packages() -> None:
    for kind, layout in LAYOUTS.items():
        number = gguf.GGMLQuantizationType(kind)
        assert (layout.name, (layout.values, layout.size)) == (number.name, gguf.GGML_QUANT_SIZES[number])


def test_metadata_and_tensors(tmp_path: Path) -> None:
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    keys = {
        "a": "héllo",
        "b": 7,
        "c": 2.5,
        "d": True,
        "e": ["x", "", "ÿ"],
        "f": [1, -2],
        "general.alignment": 32,
    }
    path = tmp_path / "x.gguf"
    path.write_bytes(whole(keys, {"w": (F32, weights, (3, 4)), "v": (F32, weights[0], (4,))}))
    read = gguf_file.read(path)
    assert {key: read.metadata[key] for key in "abcde"} == {key: keys[key] for key in "abcde"}
    assert read.metadata["f"].tolist() == [1, -2]
    assert read.tensors["w"].shape == (3, 4)
    np.testing.assert_array_equal(read.rows("w").view(np.float32), weights)
    assert read.rows("v").shape == (1, 16)


def fails(path: Path, data: bytes) -> str:
    """The message; at once, in one line and without memory for what the file claims."""
    path.write_bytes(data)
    tracemalloc.start()
    start = time.perf_counter()
    with pytest.raises(SetupError) as error:
        gguf_file.read(path)
    assert time.perf_counter() - start < 0.5
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    message = str(error.value)
    assert len(message) <= 200
    assert "\n" not in message
    return message


def array(kind: int, length: int, body: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, length) + body


HOSTILE = {
    "empty": (b"", "is empty"),
    "short": (b"GGUF\x03\x00", "truncated"),
    "magic": (header(magic=b"GGML"), "begins with b'GGML'"),
    "version 1": (header(version=1), "version 1 is not 2 or 3"),
    "big-endian": (header(version=3 << 24), "big-endian"),
    "2^63 keys": (header(num_keys=HUGE), f"claims {HUGE} metadata keys"),
    "2^63 tensors": (header(num_tensors=HUGE), f"claims {HUGE} tensors"),
    "a key too many": (header({"a": 1}, num_keys=2), "metadata keys"),
    "key of 2^63 bytes": (header(num_keys=1) + struct.pack("<Q", HUGE) + bytes(64), f"claims {HUGE} bytes"),
    "string of 2^63 bytes": (header({"a": struct.pack("<IQ", 8, HUGE)}) + bytes(64), f"claims {HUGE} bytes"),
    "string beyond the file": (header({"a": struct.pack("<IQ", 8, 900)}) + bytes(64), "beyond the file"),
    "2^62 numbers": (header({"a": array(5, 2**62)}) + bytes(64), "beyond the file"),
    "2^62 bytes": (header({"a": array(0, 2**62)}) + bytes(64), "beyond the file"),
    "2^63 strings": (header({"a": array(8, HUGE)}) + bytes(64), f"claims {HUGE} strings"),
    "array of arrays": (header({"a": array(9, 1)}) + bytes(64), "nested type 9"),
    "unknown value type": (header({"a": struct.pack("<I", 77)}) + bytes(64), "unknown type 77"),
    "same key twice": (header({"a": value(1) + text("a") + value(1)}, num_keys=2), "twice"),
    "no dimensions": (header(infos=[("w", (), F32, 0)]) + bytes(64), "0 dimensions"),
    "2^31 dimensions": (
        header(num_tensors=1) + text("w") + struct.pack("<I", 2**31) + bytes(64),
        "2147483648 dimensions",
    ),
    "shape of 2^63": (header(infos=[("w", (HUGE, 2), F32, 0)]) + bytes(64), "impossible shape"),
    "shape that overflows": (header(infos=[("w", (2**32, 2**32), F32, 0)]) + bytes(64), "impossible shape"),
    "shape of 0": (header(infos=[("w", (0, 4), F32, 0)]) + bytes(64), "impossible shape"),
    "broken block": (header(infos=[("w", (2, 31), 8, 0)]) + bytes(256), "impossible shape"),
    "data beyond the file": (header(infos=[("w", (100, 4), F32, 0)]) + bytes(64), "outside the file"),
    "offset of 2^63": (header(infos=[("w", (4,), F32, HUGE)]) + bytes(64), "outside the file"),
    "offset off the grid": (header(infos=[("w", (4,), F32, 4)]) + bytes(64), "outside the file"),
    "overlap": (
        padded(header(infos=[("w", (16,), F32, 0), ("v", (4,), F32, 32)])) + bytes(64),
        "tensors w and v overlap",
    ),
    "same tensor twice": (
        padded(header(infos=[("w", (4,), F32, 0), ("w", (4,), F32, 32)])) + bytes(64),
        "w is there twice",
    ),
    "unknown quantisation": (header(infos=[("w", (4,), 999, 0)]) + bytes(64), "unknown type 999"),
    "known but unreadable": (header(infos=[("w", (256,), 16, 0)]) + bytes(99), "IQ2_XXS"),
    "alignment 0": (header({"general.alignment": 0}), "no power of two"),
    "alignment text": (header({"general.alignment": "32"}), "no power of two"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_cost_one_line(name: str, tmp_path: Path) -> None:
    data, words = HOSTILE[name]
    assert words in fails(tmp_path / "x.gguf", data)


def test_many_empty_strings_are_bounded(tmp_path: Path) -> None:
    """A file can really hold millions of strings of length 0; it is refused before they are made."""
    count = gguf_file._MOST_STRINGS + 1
    message = fails(tmp_path / "x.gguf", header({"a": array(8, count)}) + bytes(8 * count))
    assert f"claims {count} strings" in message


def small() -> bytes:
    weights = np.zeros((4, 8), np.float32)
    keys = {"general.architecture": "llama", "tokens": ["a", "b", "c"], "kinds": [1, 2, 3], "x": 1.5}
    return whole(keys, {"w": (F32, weights, (4, 8)), "v": (F32, weights[0], (8,))})


def test_truncated_anywhere(tmp_path: Path) -> None:
    data = small()
    for end in range(len(data)):
        (tmp_path / "x.gguf").write_bytes(data[:end])
        with pytest.raises(SetupError, match=r"truncated|empty|claims|begins"):
            gguf_file.read(tmp_path / "x.gguf")


@given(
    changes=st.lists(st.tuples(st.integers(0, len(small()) - 1), st.integers(0, 255)), min_size=1, max_size=6)
)
@hypothesis_settings(max_examples=300)
def test_damaged_anywhere(changes: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Read as something or refused in a line, nothing else."""
    data = bytearray(small())
    for position, byte in changes:
        data[position] = byte
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(data)
    try:
        read = gguf_file.read(path)
    except SetupError as error:
        assert len(str(error)) <= 200
    else:
        assert all(tensor.start + tensor.size <= len(data) for tensor in read.tensors.values())


def test_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot read"):
        gguf_file.read(tmp_path / "none.gguf")
    with pytest.raises(SetupError, match="cannot read"):
        gguf_file.read(tmp_path)


# ------------------------------------------------------------------ a model out of a GGUF


def model_bytes(
    architecture: str = "llama", drop: str = "", bias: bool = False
) -> tuple[bytes, dict[str, np.ndarray]]:
    """A one-layer model in Q8_0 and float32: the file, and the float32 values in its own order."""
    hidden, heads, kv_heads, head_dim, inner, vocab = 64, 4, 2, 16, 96, 40
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, hidden),
        "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (heads * head_dim, hidden),
        "blk.0.attn_k.weight": (kv_heads * head_dim, hidden),
        "blk.0.attn_v.weight": (kv_heads * head_dim, hidden),
        "blk.0.attn_output.weight": (hidden, heads * head_dim),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.ffn_gate.weight": (inner, hidden),
        "blk.0.ffn_up.weight": (inner, hidden),
        "blk.0.ffn_down.weight": (hidden, inner),
    }
    if bias:
        shapes |= {f"blk.0.attn_{part}.bias": (shapes[f"blk.0.attn_{part}.weight"][0],) for part in "qkv"}
    tensors, values = {}, {}
    for name, shape in shapes.items():
        plain = generator.standard_normal(shape, np.float32)
        if len(shape) == 2:
            raw = gguf.quants.quantize(plain, gguf.GGMLQuantizationType.Q8_0)
            plain = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType.Q8_0)
            tensors[name] = (8, raw, shape)
        else:
            tensors[name] = (F32, plain, shape)
        values[name] = plain
    tensors.pop(drop, None)
    keys = {
        "general.architecture": architecture,
        f"{architecture}.block_count": 1,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": hidden,
        f"{architecture}.feed_forward_length": inner,
        f"{architecture}.attention.head_count": heads,
        f"{architecture}.attention.head_count_kv": kv_heads,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
    }
    return whole(keys, tensors), values


def files_of(path: Path, data: bytes) -> ModelFiles:
    path.write_bytes(data)
    return ModelFiles("gguf", path.stem, path.parent, (path,))


@pytest.mark.parametrize("bias", [False, True])
def test_llama_q_and_k_are_unpermuted(bias: bool, tmp_path: Path) -> None:
    """llama.cpp's converter: [heads, 2, dim / 2] -> [heads, dim / 2, 2]; biases with their weights."""
    data, values = model_bytes(bias=bias)
    loaded = load_weights.load(files_of(tmp_path / "x.gguf", data))
    layer = "model.layers.0."
    assert loaded.config.tie_word_embeddings
    for part, heads in (("q", 4), ("k", 2)):
        for kind in ("weight", "bias") if bias else ("weight",):
            ours = loaded.weights[f"{layer}self_attn.{part}_proj.{kind}"].numpy()
            permuted = ours.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(ours.shape)
            np.testing.assert_array_equal(permuted, values[f"blk.0.attn_{part}.{kind}"])
    np.testing.assert_array_equal(
        loaded.weights[f"{layer}self_attn.v_proj.weight"], values["blk.0.attn_v.weight"]
    )
    np.testing.assert_array_equal(loaded.weights["model.embed_tokens.weight"], values["token_embd.weight"])


def test_qwen_is_not_permuted(tmp_path: Path) -> None:
    data, values = model_bytes("qwen2", bias=True)
    loaded = load_weights.load(files_of(tmp_path / "x.gguf", data))
    ours = loaded.weights["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(ours, values["blk.0.attn_q.weight"])
    assert loaded.config.qkv_bias


def test_incomplete_or_foreign_model(tmp_path: Path) -> None:
    data, _ = model_bytes(drop="blk.0.ffn_up.weight")
    with pytest.raises(SetupError, match=re.escape("model.layers.0.mlp.up_proj.weight is missing")):
        load_weights.load(files_of(tmp_path / "x.gguf", data))
    zeros = np.zeros(4, np.float32)
    with pytest.raises(SetupError, match="belongs to no supported model"):
        load_weights.load(files_of(tmp_path / "y.gguf", whole({}, {"mm.vision": (F32, zeros, (4,))})))
    with pytest.raises(SetupError, match=re.escape("lacks general.architecture")):
        load_weights.load(files_of(tmp_path / "z.gguf", whole({}, {})))


def test_builtin_model(builtin_model: ModelFiles) -> None:
    """Against the gguf package, in order, and in seconds (transformers takes ten)."""
    import torch

    reports: list[tuple[int, int]] = []

    def report(done: int, total: int, what: str) -> None:
        assert threading.current_thread() is caller  # an event can be emitted from it without a lock
        reports.append((done, total))

    caller = threading.current_thread()
    start = time.perf_counter()
    loaded = load_weights.load(builtin_model, dtype=torch.float32, progress=report)
    assert time.perf_counter() - start < 8
    assert len(loaded.weights) == 272
    assert reports[-1][0] == reports[-1][1] > 90_000_000
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert 20 < len(reports) < 105
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(builtin_model.weights[0]).tensors}
    for part, heads in (("attn_q", 9), ("attn_k", 3), ("attn_v", 0)):
        tensor = theirs[f"blk.29.{part}.weight"]
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if heads:
            want = want.reshape(heads, -1, 2, want.shape[1]).swapaxes(1, 2).reshape(want.shape)
        ours = loaded.weights[f"model.layers.29.self_attn.{part[-1]}_proj.weight"]
        np.testing.assert_array_equal(ours.numpy(), want)
