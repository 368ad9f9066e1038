"""The five examples that Enter sends on an empty prompt: data in demos/examples.toml over demos/*.txt.

Owns the format of that file and checks it once. Each example starts new conversations with its page as the system
message. So the page is at the same tokens in every prompt about it, and its blocks are equal.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine import SetupError
from kvtop.play.demo import folder


@dataclass(frozen=True, slots=True)
class ExamplePrompt:
    """One request: `text` asked over the page `system`; greedy, at most `max_tokens` tokens."""

    text: str
    system: str
    system_name: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Example:
    """What one Enter sends. `title` and `why` are shown before it, `seen` says after it where to look. All prompts of
    an example are submitted at once."""

    title: str
    why: str
    seen: str
    prompts: tuple[ExamplePrompt, ...]


def load_examples(demos: Path | None = None) -> tuple[Example, ...]:
    """The examples in order, pages read from `demos`. Raises SetupError on a file that cannot be used."""
    demos = demos or folder()
    path = demos / "examples.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return tuple(_example(demos, item) for item in data["example"])
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise SetupError(f"{path.name}: {type(error).__name__}: {error}"[:200]) from error


def _example(demos: Path, item: dict[str, Any]) -> Example:
    prompts = []
    for pattern in item["pages"]:
        for page in sorted(demos.glob(pattern)):
            text = page.read_text(encoding="utf-8").strip()
            if "first_word" in item:
                text = item["first_word"] + text[len(text.split(maxsplit=1)[0]) :]
            prompts.append(ExamplePrompt(item["prompt"], text, page.name, item["max_tokens"]))
    if not prompts:
        raise SetupError(f"examples.toml: no page matches {item['pages']} in {demos.name}/")
    return Example(item["title"], item["why"], item["seen"], tuple(prompts))
