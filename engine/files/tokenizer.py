"""Text to token ids, a token's exact bytes, and the chat template.

Invariants: ids and rendered text are those of transformers; the bytes of a text's tokens, joined, are the bytes of
the text, so half a character is never lost. Foreign text goes through `guard` first (see special_tokens). A GGUF's
tokenizer is converted once and kept in the cache folder. Imports no torch, and transformers only for vocabularies
without a tokenizer.json.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from engine.errors import SetupError
from engine.files.model_files import GENERATION, ModelFiles, read, read_json, shorten
from engine.files.special_tokens import SpecialTokens

_CONVERTER = 1
"""Part of the cache key: raise it when gguf_tokenizer.py changes what it writes."""
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONVERTIBLE = ("tokenizer.model", "vocab.json")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, reversed: character -> byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def load(files: ModelFiles) -> Tokenizer:
    """The model's tokenizer. Raises SetupError if it is missing or damaged."""
    if files.kind == "gguf":
        folder = _converted_gguf(files.weights[0])
        return (
            _from_folder(folder, None, read_json(folder / GENERATION)) if isinstance(folder, Path) else folder
        )
    return _from_folder(files.folder, files.config, files.generation_config)


class Tokenizer:
    """A fast tokenizer with its special tokens and chat template."""

    def __init__(
        self, backend: Backend, config: Mapping[str, Any], template: str | None, eos_ids: Sequence[int]
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = {name: text for name in _TOKEN_NAMES if (text := _content(config.get(name)))}
        """bos_token, eos_token, …: what a chat template may name."""
        self._template = template
        self._added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self.vocab_size: int = max((*backend.get_vocab(with_added_tokens=True).values(), -1)) + 1
        """Highest id + 1; a model's logits may have more columns."""
        own = backend.token_to_id(self.special_tokens.get("eos_token", ""))
        self.eos_ids = frozenset(eos_ids) or (frozenset() if own is None else frozenset({own}))
        """Ids that end an answer: the model's list, else the tokenizer's own."""

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids. `special` adds what the model wants around plain text (its begin-of-text token)."""
        if not special and self._special.is_guarded(text):
            return self.encode_ends(text)[0]
        return self._backend.encode(_encodable(text), add_special_tokens=special).ids

    def encode_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids without specials around them, and where each token ends in `text` (characters)."""
        text = _encodable(text)
        if self._special.is_guarded(text):
            return self._special.encode_ends(text)
        encoding = self._backend.encode(text, add_special_tokens=False)
        return encoding.ids, [end for _, end in encoding.offsets]

    def guard(self, text: str) -> str:
        """Foreign text for a prompt: `encode` and `encode_ends` will not make special tokens of the names in it."""
        return self._special.guard(_encodable(text))

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self._backend)

    @property
    def special_names(self) -> list[str]:
        """The names of all special tokens, as a text would spell them."""
        return self._special.names

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token, b"" for an id outside the vocabulary; joined they are the text's bytes."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._make_bytes(token_id)
        return found

    def is_special(self, token_id: int) -> bool:
        """True for control tokens, which are no part of an answer's text."""
        added = self._added.get(token_id)
        return added is not None and added.special

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """The chat template over [{role, content}]. Raises engine.chat.template.TemplateRefused (a ValueError)."""
        if self._template is None:
            raise ValueError("this model has no chat template")
        return self._render(messages, add_generation_prompt, self.special_tokens)

    @cached_property
    def _render(self) -> Any:
        from engine.chat.template import compile_template  # jinja2 costs a twentieth of a second

        return compile_template(self._template or "")

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in f"{self._backend.decoder} {self._backend.pre_tokenizer}"

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode("utf-8", "replace")
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            # a character outside the alphabet can only be a mislabelled control token
            return b"".join(bytes((_BYTE_OF[c],)) if c in _BYTE_OF else c.encode() for c in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes((int(token[3:5], 16),))
            except ValueError:
                pass
        return token.replace("▁", " ").encode()


_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


def _encodable(text: str) -> str:
    """UTF-8 has no lone surrogates; each becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.translate(_SURROGATES)
    return text


def _content(token: Any) -> str | None:
    """A special token in tokenizer_config.json is a text or an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


# ------------------------------------------------------------------ folders in Hugging Face's layout


def _from_folder(
    folder: Path, config: Mapping[str, Any] | None, generation: Mapping[str, Any] | None
) -> Tokenizer:
    from engine.files.hf_config import eos_token_ids

    tokenizer_config = _optional_json(folder / "tokenizer_config.json")
    tokenizer_config = {**_optional_json(folder / "special_tokens_map.json"), **tokenizer_config}
    path = folder / "tokenizer.json"
    if path.is_file():
        backend = _backend(read(path), path)
    elif any((folder / name).is_file() for name in _CONVERTIBLE):
        backend = _through_transformers(folder)
    else:
        raise SetupError(
            f"{shorten(str(folder))} has no tokenizer.json; kvtop needs the model's tokenizer files"
        )
    _add_configured(backend, tokenizer_config)
    return Tokenizer(
        backend, tokenizer_config, _template(folder, tokenizer_config), eos_token_ids(config, generation)
    )


def _backend(data: bytes, path: Path) -> Backend:
    try:
        return Backend.from_buffer(data)
    except Exception as error:  # tokenizers raises plain Exception
        raise SetupError(f"{shorten(str(path))} is no valid tokenizer: {error}; fetch it again") from error


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _add_configured(backend: Backend, config: Mapping[str, Any]) -> None:
    """Added tokens that only tokenizer_config.json knows; transformers adds them too."""
    known = backend.get_added_tokens_decoder()
    listed = config.get("added_tokens_decoder")
    listed = listed if isinstance(listed, dict) else {}
    ids = [key for key in listed if key.isdecimal() and isinstance(listed[key], dict)]
    for index in sorted(ids, key=int):
        entry = listed[index]
        content = _content(entry)
        if content and int(index) not in known:
            flags = {
                key: bool(entry[key])
                for key in ("single_word", "lstrip", "rstrip", "normalized")
                if key in entry
            }
            token = AddedToken(content, special=bool(entry.get("special")), **flags)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over chat_template.json and tokenizer_config.json, as in transformers."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read(path).decode("utf-8", "replace")
    template = _optional_json(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(template, list):  # named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _through_transformers(folder: Path) -> Backend:
    """Old vocabularies (vocab.json with merges.txt, tokenizer.model): transformers can convert them."""
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
    except Exception as error:  # a converter may raise anything; the advice is the same
        raise SetupError(
            f"{shorten(str(folder))} has no tokenizer.json and its vocabulary cannot be converted "
            f"({type(error).__name__}); fetch tokenizer.json too"
        ) from error


# ------------------------------------------------------------------ GGUF


def _converted_gguf(path: Path) -> Path | Tokenizer:
    """Folder of the converted tokenizer; the tokenizer itself where the cache cannot be written."""
    from engine.cache_folder import cache_dir

    try:
        stat = path.stat()
    except OSError as error:
        raise SetupError(f"cannot read {shorten(str(path))}: {error.strerror}") from error
    key = f"{_CONVERTER}:{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    folder = cache_dir() / "tokenizers" / f"{path.stem[:60]}-{xxhash.xxh3_64_hexdigest(key.encode())}"
    if (folder / "tokenizer.json").is_file():
        return folder
    from engine.files import gguf_file
    from engine.files.gguf_config import eos_token_ids as gguf_eos_ids
    from engine.files.gguf_tokenizer import convert

    metadata = gguf_file.read(path).metadata
    tokenizer, config = convert(metadata)
    eos = gguf_eos_ids(metadata)
    serialized = json.dumps(tokenizer, ensure_ascii=False).encode("utf-8", "replace")
    backend = _backend(serialized, path)  # never cache what does not load
    try:
        _store(folder, serialized, config, {"eos_token_id": list(eos)})
        return folder
    except OSError:
        return Tokenizer(backend, config, config.get("chat_template"), eos)


def _store(folder: Path, tokenizer: bytes, config: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """The folder appears whole. If another process was faster, its folder is kept."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent, ignore_cleanup_errors=True) as name:
        made = Path(name) / "tokenizer"
        made.mkdir()
        (made / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False), "utf-8")
        (made / GENERATION).write_text(json.dumps(generation), "utf-8")
        (made / "tokenizer.json").write_bytes(tokenizer)
        try:
            os.rename(made, folder)
        except OSError:
            if not (folder / "tokenizer.json").is_file():
                shutil.rmtree(folder, ignore_errors=True)  # an incomplete folder
                os.rename(made, folder)
