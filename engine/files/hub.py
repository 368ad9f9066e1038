"""Files for what the user typed as --model: a hub id, a folder, a .gguf file, or nothing for the built-in model.

Decides which of these it is. Everything that can go wrong (typing, network, gated models, disk) is a SetupError that
says what to do. Cached files need no network. Imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.errors import SetupError
from engine.files.builtin import NAME, fetch
from engine.files.model_files import ModelFiles, Progress, from_folder, shorten

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def resolve(
    model: str | None, *, revision: str | None = None, progress: Progress | None = None
) -> ModelFiles:
    """Files of `model`, fetched if they are not on this machine yet. None is the built-in model.

    Raises SetupError: not found, gated, no network, no space, incomplete or malformed files.
    """
    report = progress or (lambda done, total, what: None)
    if model is None:
        path = fetch(report)
        return ModelFiles("gguf", NAME, path.parent, (path,))
    if not model:
        raise SetupError("--model is empty; leave it out for the built-in model, or name one")
    try:
        path = Path(model).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        raise SetupError(f"--model {shorten(model)} is no usable path: {error}") from error
    if is_dir:
        return from_folder(path, name=path.resolve().name)
    if is_file:
        if path.suffix.lower() == ".gguf":
            return ModelFiles("gguf", path.stem, path.parent, (path,))
        raise SetupError(
            f"--model {shorten(model)} is a file but no .gguf; give the folder that holds config.json"
        )
    if path.suffix.lower() == ".gguf" or model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        raise SetupError(
            f"--model {shorten(model)}: no such file or folder, and no hub id like Qwen/Qwen3-0.6B; check it"
        )
    from engine.files.hub_fetch import fetch_snapshot

    return from_folder(fetch_snapshot(model, revision, report), name=model)
