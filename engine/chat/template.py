"""Chat templates: Jinja2 in transformers' sandbox, without importing transformers.

Invariant: for the same template, messages and special tokens the text is the one that transformers'
apply_chat_template renders. Templates are code from other people: they run in the sandbox and get only strings. Every
failure of one is a TemplateRefused. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from engine.chat.sandbox import MOST, Sandbox, TooMuch, limited_time

_LONGEST = 1 << 20
"""Characters of a template's source. The longest known template has 20,000."""


class TemplateRefused(ValueError):
    """The template raised an error or is not valid Jinja. The message is one line."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the text of the assistant for training. Here only its body matters."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> Callable[[Sequence[Mapping[str, str]], bool, Mapping[str, str]], str]:
    """render(messages, add_generation_prompt, special tokens by name) -> text. Raises TemplateRefused."""
    if len(source) > _LONGEST:
        raise TemplateRefused(f"the model's chat template is longer than {_LONGEST:,} characters")
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.bound()
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        with limited_time():
            template = environment.from_string(source)
    except Exception as error:  # also for Python's limits: recursion, nesting, memory
        raise TemplateRefused(f"the model's chat template is not valid: {_line(error)}") from error

    def render(messages: Sequence[Mapping[str, str]], prompt: bool, special: Mapping[str, str]) -> str:
        try:
            variables = {
                "messages": [dict(message) for message in messages],
                "tools": None,
                "documents": None,
                "add_generation_prompt": prompt,
                **special,
            }
            parts: list[str] = []
            length = 0
            with limited_time():
                for part in template.generate(variables):
                    parts.append(part)
                    length += len(part)
                    if length > MOST:
                        raise TooMuch(f"it makes more than {MOST >> 20} Mi characters")
            return "".join(parts)
        except Exception as error:  # a template is a program and can fail in any way
            raise TemplateRefused(f"the model's chat template refuses this: {_line(error)}") from error

    return render


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's filter would escape characters for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
