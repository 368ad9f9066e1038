"""The cache folder: the built-in model, converted tokenizers, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_dir


def cache_dir() -> Path:
    """KVTOP_CACHE, else the user's cache."""
    chosen = os.environ.get("KVTOP_CACHE")
    return Path(chosen).expanduser() if chosen else Path(user_cache_dir("kvtop", appauthor=False))
