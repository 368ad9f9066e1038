"""The tokenizer inside a GGUF's metadata, rewritten as tokenizer.json and tokenizer_config.json.

A GGUF only names how text is split before merging (`tokenizer.ggml.pre`); what the names mean is written here.
An unknown name is refused: a wrong split would silently give other tokens than the model was trained on.
Every key has one type; another one is refused with the key's name. Imports no torch and no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.errors import SetupError
from engine.files.hf_config import Keys

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = ({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},)
_PRE_TOKENIZERS: dict[str, tuple[dict[str, Any], ...]] = {
    **dict.fromkeys(("default", "gpt-2"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell"),
        ({"type": "Digits", "individual_digits": True}, *_GPT2),
    ),
}
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "tekken": _TEKKEN,
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Vocabularies in which a word that is a token is taken whole, whatever the merges would do."""

_PREFIX = "tokenizer.ggml."

Converted = tuple[dict[str, Any], dict[str, Any]]


class _Keys(Keys):
    """Typed access to what a GGUF says under `tokenizer.ggml.`."""

    def texts(self, name: str) -> list[str]:
        """An array of texts; empty where there is none."""
        value = self.values.get(_PREFIX + name)
        if isinstance(value, np.ndarray) and not value.size:  # an empty array may be of any type
            value = None
        if value is not None and not isinstance(value, list):
            raise SetupError(f"{self.where}: {_PREFIX}{name} must be an array of texts; fetch it again")
        return value or []

    def numbers(self, name: str, *, whole: bool = False) -> list[Any]:
        """An array of numbers without NaN; empty where there is none."""
        value = self.values.get(_PREFIX + name)
        if value is None or (isinstance(value, list) and not value):
            return []
        kinds = "iu" if whole else "iuf"
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or np.isnan(value).any():
            what = "whole numbers" if whole else "numbers"
            raise SetupError(f"{self.where}: {_PREFIX}{name} must be an array of {what}; fetch it again")
        return list(value.tolist())

    def token(self, name: str, tokens: list[str]) -> str | None:
        """The text of a special token. None where there is none: converters then write no id, or one beyond the
        vocabulary."""
        index = self.get(f"{_PREFIX}{name}_token_id", int, None)
        return tokens[index] if index is not None and 0 <= index < len(tokens) else None


def convert(metadata: Mapping[str, Any]) -> Converted:
    """(tokenizer.json, tokenizer_config.json) as objects. Raises SetupError: missing or unknown parts."""
    keys = _Keys(metadata, "GGUF metadata")
    tokens = keys.texts("tokens")
    if not tokens:
        raise SetupError("this GGUF has no tokenizer.ggml.tokens: it brings no tokenizer; take another file")
    kinds = keys.numbers("token_type", whole=True)
    if kinds and len(kinds) != len(tokens):
        raise SetupError(f"GGUF metadata: {len(tokens)} tokens but {len(kinds)} token_type; fetch it again")
    model = keys.get(_PREFIX + "model", str)
    if model == "gpt2":
        pipeline = _byte_level(keys, tokens)
    elif model == "llama":
        pipeline = _sentencepiece(keys, tokens)
    else:
        raise SetupError(
            f"GGUF metadata: tokenizer.ggml.model {model:.30} is not supported (gpt2, llama); use the safetensors"
        )
    config = _config(keys, tokens)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, kinds),
        **pipeline,
        "post_processor": _post_processor(keys, tokens, model),
    }
    return tokenizer, config


def _added(tokens: list[str], kinds: list[int]) -> list[dict[str, Any]]:
    """Control tokens are special; user-defined ones (<think>) are only matched whole."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": index, "content": token, **flags, "special": kind == _CONTROL}
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and token
    ]


def _byte_level(keys: _Keys, tokens: list[str]) -> dict[str, Any]:
    pre = keys.get(_PREFIX + "pre", str, "default")
    if pre in _SPLITS:
        split = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
        steps: tuple[dict[str, Any], ...] = (split, {**_GPT2[0], "use_regex": False})
    elif pre in _PRE_TOKENIZERS:
        steps = _PRE_TOKENIZERS[pre]
    else:
        raise SetupError(
            f"GGUF metadata: tokenizer.ggml.pre {pre:.40} is not known to kvtop; use the model's safetensors"
        )
    return {
        # Qwen's published tokenizers normalise, which their GGUFs do not say
        "normalizer": {"type": "NFC"} if _SPLITS.get(pre) is _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, _merges(keys), ignore_merges=pre in _WHOLE_WORDS_FIRST),
    }


def _sentencepiece(keys: _Keys, tokens: list[str]) -> dict[str, Any]:
    """As in tokenizer.json of Llama-2 and Mistral: each stretch between special tokens gets a space first."""
    prefix = keys.get(_PREFIX + "add_space_prefix", bool, True)
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(tokens, _merges(keys) or _merges_of(tokens, keys), fuse_unk=True, byte_fallback=True)
    has_unknown = keys.get(_PREFIX + "unknown_token_id", int, None) is not None
    model["unk_token"] = keys.token("unknown", tokens) if has_unknown else tokens[0]
    prepend = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, space]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": model,
    }


def _bpe(tokens: list[str], merges: list[list[str]], **flags: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {"dropout": None, "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    plain |= {"continuing_subword_prefix": None, "end_of_word_suffix": None, "ignore_merges": False}
    vocab = {token: index for index, token in enumerate(tokens)}
    return {"type": "BPE", **plain, **flags, "vocab": vocab, "merges": merges}


def _merges(keys: _Keys) -> list[list[str]]:
    merges = [merge.split(" ") for merge in keys.texts("merges")]
    for merge in merges:
        if len(merge) != 2:
            raise SetupError(
                f"GGUF metadata: {_PREFIX}merges has {' '.join(merge)!r:.40}, not two tokens; fetch it again"
            )
    return merges


def _merges_of(tokens: list[str], keys: _Keys) -> list[list[str]]:
    """SentencePiece keeps scores instead of merges: every cut of a token into two tokens is one, the best
    score first (as in transformers' generate_merges)."""
    scores = keys.numbers("scores")
    if len(scores) != len(tokens):
        raise SetupError(
            "GGUF metadata: tokenizer.ggml.scores has no score for each token, and there are no merges; fetch it again"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = [
            (token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab
        ]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        found += [(score, left, right) for left, right in cuts]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in found]


def _post_processor(keys: _Keys, tokens: list[str], model: str) -> dict[str, Any] | None:
    """Begin-of-text before plain prompts, where the file (or llama.cpp's default for its kind) says so."""
    pre = keys.get(_PREFIX + "pre", str, "")
    by_default = model == "llama" or _SPLITS.get(pre) is _LLAMA3
    bos = keys.token("bos", tokens)
    if not keys.get(_PREFIX + "add_bos_token", bool, by_default) or bos is None:
        return None
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    text, pair = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    special = {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, pair],
        "special_tokens": special,
    }


def _config(keys: _Keys, tokens: list[str]) -> dict[str, Any]:
    """What a chat template may use, and the template."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {key: keys.token(name, tokens) for key, name in names.items()}
    config["chat_template"] = keys.get("tokenizer.chat_template", str, None)
    return {key: value for key, value in config.items() if value is not None}
