"""The tokenizer inside a GGUF's metadata, rewritten as tokenizer.json and tokenizer_config.json.

Owns the knowledge that a GGUF leaves out: how text was cut before the merges were learned, which it only
names (`tokenizer.ggml.pre`). A name that is not known is refused: a wrong cut would make other tokens than
the model was trained on, silently. Imports no torch and no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import SetupError

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

Converted = tuple[dict[str, Any], dict[str, Any]]


def convert(metadata: Mapping[str, Any]) -> Converted:
    """(tokenizer.json, tokenizer_config.json) as objects. Raises SetupError: missing or unknown parts."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise SetupError("this GGUF has no tokenizer.ggml.tokens: it brings no tokenizer; take another file")
    kinds = [int(kind) for kind in metadata.get("tokenizer.ggml.token_type", ())]
    if kinds and len(kinds) != len(tokens):
        raise SetupError(f"GGUF metadata: {len(tokens)} tokens but {len(kinds)} token types; fetch it again")
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        pipeline = _byte_level(metadata, tokens)
    elif model == "llama":
        pipeline = _sentencepiece(metadata, tokens)
    else:
        raise SetupError(
            f"GGUF tokenizer {model!s:.30} is not supported (gpt2 and llama are); use the safetensors"
        )
    config = _config(metadata, tokens)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, kinds),
        **pipeline,
        "post_processor": _post_processor(metadata, tokens, model),
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


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if pre in _SPLITS:
        split = {"type": "Split", "pattern": {"Regex": _SPLITS[pre]}, "behavior": "Isolated", "invert": False}
        steps: tuple[dict[str, Any], ...] = (split, {**_GPT2[0], "use_regex": False})
    elif pre in _PRE_TOKENIZERS:
        steps = _PRE_TOKENIZERS[pre]
    else:
        raise SetupError(f"GGUF pre-tokenizer {pre:.40} is not known to kvtop; use the model's safetensors")
    return {
        # Qwen's published tokenizers normalise, which their GGUFs do not say
        "normalizer": {"type": "NFC"} if _SPLITS.get(pre) is _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(tokens, _merges(metadata), ignore_merges=pre in _WHOLE_WORDS_FIRST),
    }


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """As in tokenizer.json of Llama-2 and Mistral: each stretch between special tokens gets a space first."""
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = _bpe(tokens, _merges(metadata) or _merges_of(tokens, metadata), fuse_unk=True, byte_fallback=True)
    model["unk_token"] = tokens[unknown] if isinstance(unknown, int) and 0 <= unknown < len(tokens) else None
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


def _merges(metadata: Mapping[str, Any]) -> list[list[str]]:
    merges = [merge.split(" ") for merge in metadata.get("tokenizer.ggml.merges", ())]
    for merge in merges:
        if len(merge) != 2:
            raise SetupError(
                f"GGUF metadata: merge {' '.join(merge)!r:.40} is not two tokens; fetch it again"
            )
    return merges


def _merges_of(tokens: list[str], metadata: Mapping[str, Any]) -> list[list[str]]:
    """SentencePiece keeps scores instead of merges: every cut of a token into two tokens is one, the best
    score first (as in transformers' generate_merges)."""
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise SetupError(
            "GGUF metadata: the tokenizer has neither merges nor a score for each token; fetch it again"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores.tolist(), strict=True):
        cuts = [
            (token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocab and token[i:] in vocab
        ]
        cuts.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        found += [(score, left, right) for left, right in cuts]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [[left, right] for _, left, right in found]


def _token(metadata: Mapping[str, Any], tokens: list[str], name: str) -> str | None:
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _post_processor(metadata: Mapping[str, Any], tokens: list[str], model: str) -> dict[str, Any] | None:
    """Begin-of-text before plain prompts, where the file (or llama.cpp's default for its kind) says so."""
    pre = metadata.get("tokenizer.ggml.pre")
    by_default = model == "llama" or _SPLITS.get(str(pre)) is _LLAMA3
    bos = _token(metadata, tokens, "bos")
    if bos is None or not metadata.get("tokenizer.ggml.add_bos_token", by_default):
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


def _config(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    """What a chat template may use, and the template."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config: dict[str, Any] = {key: _token(metadata, tokens, name) for key, name in names.items()}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return {key: value for key, value in config.items() if value is not None}
