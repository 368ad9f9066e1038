"""ModelFiles: the files of one model in a folder, and which of them are wanted.

Only config, generation config, tokenizer and the safetensors that the index names are wanted. A file that is
missing or malformed raises a SetupError with its name. Imports no torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.errors import SetupError

Progress = Callable[[int, int, str], None]
"""(done, total, what): bytes while something is fetched; may raise to give up."""

CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Files of one model, all present when it was made."""

    kind: Literal["gguf", "safetensors"]
    name: str
    """For people: hub id, folder or file name."""
    folder: Path
    weights: tuple[Path, ...]
    config: dict[str, Any] | None = None
    """config.json; None for a GGUF, whose metadata says it all."""
    generation_config: dict[str, Any] | None = None
    weight_map: dict[str, str] | None = None
    """Tensor name -> file name from the index; None where one file holds everything."""


def from_folder(folder: Path, *, name: str) -> ModelFiles:
    """ModelFiles of a folder with config.json and safetensors (single or sharded), or with one .gguf."""
    where = shorten(str(folder))
    if not (folder / CONFIG).is_file():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelFiles("gguf", ggufs[0].stem, folder, (ggufs[0],))
        if ggufs:
            raise SetupError(f"{where} holds {len(ggufs)} .gguf files; give --model the path of one of them")
        raise SetupError(
            f"{where} has no {CONFIG}; --model needs a folder with {CONFIG} and *.safetensors, or a .gguf"
        )
    config = read_json(folder / CONFIG)
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else None
    weight_map = None
    if (folder / INDEX).is_file():
        weight_map = read_index(folder / INDEX)
        weights = [folder / shard for shard in sorted(set(weight_map.values()))]
        for shard in weights:
            if not shard.is_file():
                raise SetupError(
                    f"{where}: the index names {shorten(shard.name)}, which is missing; fetch it again"
                )
    elif (folder / SINGLE).is_file():
        weights = [folder / SINGLE]
    else:
        weights = sorted(folder.glob("*.safetensors"))
        if len(weights) != 1:
            raise SetupError(
                f"{where} has no {SINGLE} and no {INDEX}; "
                "kvtop reads safetensors and GGUF, so convert or fetch the weights as one of these"
            )
    return ModelFiles("safetensors", name, folder, tuple(weights), config, generation, weight_map)


def read(path: Path) -> bytes:
    """A small file: at most 64 MiB. Raises SetupError that names it."""
    try:
        if path.stat().st_size > _LIMIT:
            raise SetupError(
                f"{shorten(str(path))} is larger than 64 MiB, which no such file is; fetch it again"
            )
        return path.read_bytes()
    except OSError as error:
        raise SetupError(f"cannot read {shorten(str(path))}: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a small JSON file. Raises SetupError that names the file."""
    try:
        value = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{shorten(str(path))} is not valid JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise SetupError(f"{shorten(str(path))} must hold a JSON object, not {type(value).__name__}")
    return value


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard file of a safetensors index. A name that leaves the folder is refused."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SetupError(f"{shorten(str(path))} has no weight_map; fetch it again")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", shard):
            raise SetupError(
                f"{shorten(str(path))} names {shorten(repr(shard))}, which is no *.safetensors beside it"
            )
    return weight_map


def shorten(text: str, limit: int = 70) -> str:
    """At most `limit` characters, one line, the middle left out: a path's ends tell most."""
    text = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return text if len(text) <= limit else f"{text[: limit // 2 - 2]}…{text[-(limit - limit // 2 - 1) :]}"
