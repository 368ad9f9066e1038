"""A toy model that can chat: ToyRunner with a tokenizer of word pieces, so that demos play in milliseconds."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from engine.config import EngineConfig
from engine.files.model_files import Progress
from engine.loaded import Built
from tests.toy_runner import ToyRunner

VOCAB = 20_000


class WordPieces:
    """Pieces of at most five characters, numbered as they come; ChatML as the template."""

    eos_ids = frozenset({0})
    has_chat_template = True

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"<|end|>": 0}

    def encode(self, text: str, special: bool = False) -> list[int]:
        return self.encode_ends(text)[0]

    def encode_ends(self, text: str) -> tuple[list[int], list[int]]:
        found = list(re.finditer(r"<\|\w+\|>|\s?\w{1,5}|\s|[^\w\s]", text))
        return [self._ids.setdefault(m.group(), len(self._ids)) for m in found], [m.end() for m in found]

    def guard(self, text: str) -> str:
        return text

    def token_bytes(self, token_id: int) -> bytes:
        texts = list(self._ids)
        return (texts[token_id] if token_id < len(texts) else f" w{token_id}").encode()

    def is_special(self, token_id: int) -> bool:
        return token_id == 0

    def render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)
        return text + "<|assistant|>" * add_generation_prompt


def build(config: EngineConfig, progress: Progress) -> Built:
    """For `Engine(config, build=build)`."""
    runner = ToyRunner(config.num_blocks or 546, config.block_size, VOCAB, config.max_model_len)
    return Built(runner, WordPieces(), eos_ids=(0,))
