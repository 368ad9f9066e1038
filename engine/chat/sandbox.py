"""A sandbox that limits the time and memory of chat templates, which are code from other people.

Jinja's sandbox protects the interpreter, but allows `"a" * 10**10` and nested loops. Here every operation whose result
can be much larger than its operands checks their size first (products, powers, joins, filters, methods of texts). A
trace function ends a template that takes too long. Invariant: ordinary templates render as without these limits.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import FrameType, GeneratorType
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST = 16 << 20
"""Characters (and list entries) of a value: several times as many as the longest context of a model."""
SECONDS = 2.0
"""Processor time, not real time, so that a busy machine refuses no template."""
_NODES = 1 << 18
"""Most values in a nested value. More count as too large, so that a list that contains itself is refused."""
_LARGEST = 1 << 16
"""Largest number for a filter or a method of a text (a width, a length)."""
_BITS = 4096
_WIDE = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)|\{[^}]*\d{5,}")
"""In a format: a field of 10,000 characters or more, or a field whose width is an argument."""


class TooMuch(ValueError):
    """The template asks for more time or memory than it may have; one line."""


class _OutOfTime(BaseException):
    """A BaseException, so that no `except Exception` in a filter catches it."""


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment whose templates create no value larger than MOST."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_weighed, **options)
        self.code_generator_class = _Generator
        del self.globals["lipsum"]
        self.bound()

    def bound(self) -> None:
        """Check arguments and results of all filters and tests. Call it again after one was added."""
        for name, function in self.filters.items():
            if not hasattr(function, "bounded"):
                self.filters[name] = _bounded(name, function)
        tests: dict[str, Any] = self.tests
        for name, test in tests.items():
            if not hasattr(test, "bounded"):
                tests[name] = _bounded_test(test)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """An operator, with a check of its operands."""
        if (
            operator == "+" and isinstance(left, str) and isinstance(right, str)
        ):  # the most frequent operation
            if len(left) + len(right) > MOST:
                raise TooMuch(f"it makes more than {MOST >> 20} Mi characters")
            return left + right
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right)
        elif not isinstance(left, (int, float)):
            _weighed((left, right))
        return super().call_binop(context, operator, left, right)

    def weighed(self, value: Any) -> Any:
        """An operand of a comparison: two nested lists may take for ever to compare, inside one operation."""
        return value if isinstance(value, (str, int, float)) or value is None else _weighed(value)

    def joined(self, values: tuple[Any, ...]) -> str:
        """`a ~ b`."""
        _weighed(values)
        return "".join(map(str, values))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call. Methods of texts check their arguments."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, (str, bytes)):
            args = tuple(list(a) if isinstance(a, GeneratorType) else a for a in args)
            _check_text(getattr(obj, "__name__", ""), owner, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`"…".format` with a check. Jinja's sandbox replaces this method."""
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_text(value.__name__, value.__self__, args, kwargs)
            return wrapper(*args, **kwargs)

        return checked


class _Generator(CodeGenerator):
    """Compiles `a ~ b` to a call of Sandbox.joined, and operands of comparisons to calls of Sandbox.weighed."""

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._weigh(node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._weigh(operand.expr, frame)
        self.write(")")

    def _weigh(self, node: jinja2.nodes.Expr, frame: Frame) -> None:
        self.write("environment.weighed(")
        self.visit(node, frame)
        self.write(")")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


@contextmanager
def limited_time(seconds: float = SECONDS) -> Iterator[None]:
    """Raises TooMuch if the code inside takes longer, in this thread."""
    # Processor time is never more than real time, which is cheaper to read, so real time is checked first.
    clock, end, clock_end = time.perf_counter, time.thread_time() + seconds, time.perf_counter() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if clock() > clock_end and time.thread_time() > end:
            raise _OutOfTime
        # Only the lines of the template are traced. What Jinja does for one line is short.
        return trace if frame.f_code.co_filename == "<template>" else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except _OutOfTime:
        raise TooMuch(f"it takes more than {seconds:g} s") from None
    finally:
        sys.settrace(before)


# ------------------------------------------------------------------------------------------ weights


def _weighed(value: Any) -> Any:
    """Returns `value`. Raises TooMuch if its texts and lists together are larger than MOST."""
    if isinstance(value, str):
        if len(value) > MOST:
            raise TooMuch(f"it makes more than {MOST >> 20} Mi characters")
        return value
    total, nodes, todo = 0, 0, [value]
    while todo:
        one = todo.pop()
        nodes += 1
        if isinstance(one, (str, bytes)):
            total += len(one)
        elif isinstance(one, Mapping):
            todo += [*one.keys(), *one.values()] if len(one) <= _NODES else []
            total += len(one)
        elif isinstance(one, (list, tuple, set, frozenset)):
            todo += one if len(one) <= _NODES else []
            total += len(one)
        elif isinstance(one, int):
            total += one.bit_length() >> 3
        if total > MOST or nodes > _NODES or len(todo) > 2 * _NODES:
            raise TooMuch(f"it makes more than {MOST >> 20} Mi characters")
    return value


def _check_product(left: Any, right: Any) -> None:
    for times, of in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(of, int):
            if times.bit_length() + of.bit_length() > _BITS:
                raise TooMuch("it makes too large a number")
        elif isinstance(times, int) and isinstance(of, (str, bytes, list, tuple)):
            _weighed(of)
            if len(of) * times > MOST:
                raise TooMuch(f"it makes more than {MOST >> 20} Mi characters")


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > _BITS:
        raise TooMuch("it makes too large a number")


def _check_format(form: str, values: Any) -> None:
    """A format may name a value many times."""
    _weighed(values)
    if _WIDE.search(form):
        raise TooMuch("it formats with too wide a field")
    longest = max((len(text) for text in _texts(values)), default=0)
    if longest * (form.count("%") + form.count("{")) > MOST:
        raise TooMuch(f"it makes more than {MOST >> 20} Mi characters")


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value whose size was checked."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _texts(one)


def _check_numbers(values: tuple[Any, ...]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise TooMuch(f"it asks for a width or length of {str(value)[:20]}")


def _check_replace(text: str, args: tuple[Any, ...]) -> None:
    if len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        found = text.count(args[0]) if args[0] else len(text) + 1
        if len(text) + found * len(args[1]) > MOST:
            raise TooMuch(f"it makes more than {MOST >> 20} Mi characters")


def _check_text(name: str, text: str | bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check a call of a text's method."""
    _weighed((text, args, kwargs))
    if name in ("format", "format_map"):
        _check_format(str(text), (args, kwargs))
        if re.search(r"\{[^}]*\{", str(text)):  # the width of a field is another field
            _check_numbers(
                (*args, *kwargs.values(), *(v for a in args if isinstance(a, dict) for v in a.values()))
            )
        return
    _check_numbers((*args, *kwargs.values()))
    if name == "replace":
        _check_replace(str(text), args)
    elif name == "translate":
        _check_product(len(text), max(_texts(args), key=len, default=""))
    elif name == "join" and args and isinstance(args[0], (list, tuple, str)):
        _check_product(len(args[0]), text)
    elif name in ("expandtabs", "ljust", "rjust", "center", "zfill"):
        widest = max((a for a in args if isinstance(a, int)), default=8)
        _check_product(str(text).count("\t") + 1, " " * widest)


def _bounded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test (`is eq`, `is in`) that checks its arguments."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _weighed([v for v in (*args, *kwargs.values()) if isinstance(v, (str, bytes, list, tuple, dict))])
        return function(*args, **kwargs)

    call.bounded = True  # type: ignore[attr-defined]
    return call


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks its arguments and its result."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(a) if isinstance(a, GeneratorType) else a for a in args)
        values = (*args, *kwargs.values())
        _weighed([v for v in values if isinstance(v, (str, bytes, list, tuple, dict))])
        if name not in (
            "default",
            "d",
            "abs",
            "int",
            "float",
            "string",
            "e",
            "escape",
            "format",
            "map",
            "select",
        ):
            _check_numbers(values)
        texts = [v for v in values if isinstance(v, str)]
        if name == "replace" and texts:
            _check_replace(texts[0], tuple(texts[1:]))
        elif name == "format" and texts:
            _check_format(texts[0], values[1:])
        elif name not in (
            "default",
            "d",
        ):  # indent by a text, wrap with one, link with one: length times length
            first, second = sorted([0, 0, *map(len, texts)])[:-3:-1]
            if first * second > 16 * MOST:
                raise TooMuch(f"it makes more than {MOST >> 20} Mi characters")
        if name in ("indent", "tojson", "center", "join"):
            numbers = max((v for v in values if isinstance(v, int)), default=4)
            longest = max([numbers, *(len(t) for t in texts[-1:] if name == "join")])
            entries = sum(len(v) if isinstance(v, (str, list, tuple, dict)) else 1 for v in values)
            if name == "indent":
                entries = sum(t.count("\n") + 1 for t in texts[:1])
            if name != "center" and entries * longest > 16 * MOST:
                raise TooMuch(f"it makes more than {MOST >> 20} Mi characters")
        result = function(*args, **kwargs)
        return _weighed(result) if isinstance(result, str) else result

    call.bounded = True  # type: ignore[attr-defined]
    return call
