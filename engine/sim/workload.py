"""Workloads: which requests arrive when, read from TOML. Pure data, the same for the same seed.

Owns the format of the file, its checks and the shipped loads. A workload is a set of streams. Each stream has a number
of requests, arrivals (Poisson, bursts, or users in a closed loop) and prompts (with shared prefixes, under the names of
vLLM's prefix_repetition and SGLang's generated-shared-prefix). engine.sim.arrivals plays one. Imports no torch.
"""

from __future__ import annotations

import math
import random
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from engine.errors import SetupError

FOLDER = Path(__file__).with_name("loads")
LARGEST_FILE = 1 << 20
MOST_REQUESTS = 1_000_000
MOST_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class Length:
    """Number of tokens of one part of a request: always `mean`, or uniform between low and high. With a sigma it is
    log-normal with the median `mean`, limited to low and high."""

    low: int
    high: int
    mean: float
    sigma: float = 0.0

    def draw(self, chance: random.Random) -> int:
        """Draws one length."""
        if self.low == self.high:
            return self.low
        if not self.sigma:
            return chance.randint(self.low, self.high)
        return min(self.high, max(self.low, round(chance.lognormvariate(math.log(self.mean), self.sigma))))


# --------------------------------------------------------------------------------------- arrivals


@dataclass(frozen=True, slots=True)
class Poisson:
    """`rate` requests a second on average. burstiness as in vLLM: 1 is Poisson, less comes in clusters, more is
    steadier (the gaps are gamma distributed with this shape)."""

    rate: float
    burstiness: float = 1.0
    KIND: ClassVar[str] = "poisson"


@dataclass(frozen=True, slots=True)
class Bursts:
    """Every `every` seconds `size` requests, spread over `within` seconds."""

    every: float
    size: int
    within: float = 0.0
    KIND: ClassVar[str] = "bursts"


@dataclass(frozen=True, slots=True)
class Closed:
    """`users` who ask, read the answer, think for `think` seconds on average (exponentially distributed), ask again."""

    users: int
    think: float
    KIND: ClassVar[str] = "closed"


# ---------------------------------------------------------------------------------------- prompts


@dataclass(frozen=True, slots=True)
class PrefixRepetition:
    """vLLM's `--dataset-name prefix_repetition`: every prompt is one of num_prefixes prefixes and a suffix of its own;
    each prefix is used equally often."""

    prefix_len: Length = Length(256, 256, 256)
    suffix_len: Length = Length(256, 256, 256)
    num_prefixes: int = 10
    output_len: Length = Length(128, 128, 128)
    KIND: ClassVar[str] = "prefix_repetition"


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """SGLang's `--dataset-name generated-shared-prefix` (there with --gsp- before each name): num_groups system
    prompts, each with prompts_per_group questions, in random order."""

    system_prompt_len: Length = Length(2048, 2048, 2048)
    question_len: Length = Length(128, 128, 128)
    output_len: Length = Length(256, 256, 256)
    num_groups: int = 64
    prompts_per_group: int = 16
    KIND: ClassVar[str] = "generated-shared-prefix"


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations of `turns` questions each. Every prompt is the whole history and one more question. With closed
    arrivals each user has one conversation at a time. The conversations share num_systems system prompts."""

    question_len: Length = Length(60, 60, 60)
    output_len: Length = Length(200, 200, 200)
    turns: int = 5
    system_prompt_len: Length = Length(500, 500, 500)
    num_systems: int = 1
    KIND: ClassVar[str] = "chat"


@dataclass(frozen=True, slots=True)
class Unique:
    """Prompts that share nothing (vLLM's and SGLang's `random`)."""

    input_len: Length = Length(1024, 1024, 1024)
    output_len: Length = Length(128, 128, 128)
    KIND: ClassVar[str] = "random"


Arrivals = Poisson | Bursts | Closed
Prompts = PrefixRepetition | SharedPrefix | Chat | Unique
_ARRIVALS: dict[str, type[Any]] = {k.KIND: k for k in (Poisson, Bursts, Closed)}
_PROMPTS: dict[str, type[Any]] = {k.KIND: k for k in (PrefixRepetition, SharedPrefix, Chat, Unique)}


@dataclass(frozen=True, slots=True)
class Stream:
    """`requests` requests of one kind, the first not before second `start`."""

    name: str
    requests: int
    arrivals: Arrivals
    prompts: Prompts
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Streams that run at the same time."""

    name: str
    title: str
    seed: int
    streams: tuple[Stream, ...]

    @property
    def requests(self) -> int:
        """Requests of all streams."""
        return sum(s.requests for s in self.streams)


# ----------------------------------------------------------------------------------------- reading


def shipped() -> list[str]:
    """Names of the shipped loads."""
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


def load_workload(name: str, seed: int | None = None) -> Workload:
    """A shipped load by its name, or a TOML file. `seed` replaces the file's. Raises SetupError of one line."""
    where = f"--load {Path(name[-60:]).name}"
    try:
        path = FOLDER / f"{name}.toml" if name in shipped() else Path(name).expanduser()
        if path.suffix != ".toml" and not path.is_file():
            raise SetupError(
                f"--load {name[:60]!r}: no such load; there are {', '.join(shipped())}, or a .toml file"
            )
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise SetupError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > LARGEST_FILE:
        raise SetupError(f"{where}: over {LARGEST_FILE >> 20} MiB")
    try:
        return parse(tomllib.loads(data.decode("utf-8-sig")), path.stem, where, seed)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SetupError(f"{where}: no TOML: {error}") from None


def parse(raw: Mapping[str, Any], name: str, where: str = "workload", seed: int | None = None) -> Workload:
    """Checks the contents of a file. Raises SetupError that names the key."""
    table = _Table(raw, where)
    title = table.take("title", str, "a text", name)
    seeds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    given = table.take("seed", seeds, "a whole number between 0 and 2**63 - 1", 0)
    rows = table.take("stream", list[dict[str, Any]], "[[stream]] tables")
    table.done()
    table.need(len(rows) > 0, "stream", "needs at least one [[stream]]")
    streams = []
    for i, row in enumerate(rows, 1):
        streams.append(_stream(_Table(row, f"{where}: stream {i}"), f"stream {i}"))
    names = [s.name for s in streams]
    table.need(len(set(names)) == len(names), "stream", "two streams have the same name")
    return Workload(name, title, given if seed is None else seed, tuple(streams))


def _stream(table: _Table, name: str) -> Stream:
    short = Annotated[str, msgspec.Meta(min_length=1, max_length=40)]
    name = table.take("name", short, "a text of 1 to 40 characters", name)
    prompts = table.one_of("prompts", _PROMPTS)
    arrivals = table.one_of("arrivals", _ARRIVALS)
    start = table.number("start", 0.0, least=0.0)
    if isinstance(prompts, SharedPrefix):
        most = prompts.num_groups * prompts.prompts_per_group
        requests = table.count("requests", most, most=most)
    else:
        requests = table.count("requests")
    if isinstance(prompts, Chat):
        table.need(
            isinstance(arrivals, Closed), "prompts", "a chat needs closed arrivals: a turn follows its answer"
        )
    table.done()
    return Stream(name, requests, arrivals, prompts, start)


class _Table:
    """A TOML table whose keys are taken one by one. Keys that are left at the end are unknown, which is an error."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self._raw, self._where = dict(raw), where

    def need(self, ok: bool, key: str, what: str) -> None:
        if not ok:
            raise SetupError(f"{self._where}: {key[:40]}: {what}")

    def take(self, key: str, kind: Any, what: str, default: Any = None) -> Any:
        """The key's value as msgspec converts it to `kind`; what: what it must be."""
        value = self._raw.pop(key, default)
        self.need(value is not None, key, "is missing")
        try:
            return msgspec.convert(value, kind)
        except (msgspec.ValidationError, OverflowError):
            raise SetupError(f"{self._where}: {key[:40]}: must be {what}") from None

    def done(self) -> None:
        left = next(iter(self._raw), None)
        self.need(left is None, str(left), "no such key")

    def count(self, key: str, default: int | None = None, *, most: int = MOST_REQUESTS) -> int:
        kind = Annotated[int, msgspec.Meta(ge=1, le=most)]
        return int(self.take(key, kind, f"a whole number between 1 and {most:,}", default))

    def number(self, key: str, default: float | None = None, *, least: float, most: float = 1e9) -> float:
        kind = Annotated[float, msgspec.Meta(ge=least, le=most)]
        return float(self.take(key, kind, f"a number between {least:g} and {most:g}", default))

    def length(self, key: str, default: Length | None) -> Length:
        """120, or { low = 50, high = 400 }, or { mean = 120, sigma = 0.8, low = 1, high = 2000 }."""
        if key not in self._raw and default is not None:
            return default
        value = self.take(
            key, int | dict[str, Any], "a number of tokens, or { low, high }, or { mean, sigma }"
        )
        if isinstance(value, int):
            self.need(1 <= value <= MOST_TOKENS, key, f"must be between 1 and {MOST_TOKENS:,} tokens")
            return Length(value, value, value)
        inner = _Table(value, f"{self._where}: {key}")
        sigma = inner.number("sigma", 0.0, least=0.0, most=5.0)
        if sigma:
            mean = inner.number("mean", least=1.0, most=MOST_TOKENS)
            low = inner.count("low", 1, most=MOST_TOKENS)
            high = inner.count("high", min(MOST_TOKENS, round(20 * mean)), most=MOST_TOKENS)
        else:
            low, high = inner.count("low", most=MOST_TOKENS), inner.count("high", most=MOST_TOKENS)
            mean = (low + high) / 2
        inner.done()
        self.need(low <= high, key, "low must not be over high")
        return Length(low, high, mean, sigma)

    def one_of(self, key: str, kinds: dict[str, type[Any]]) -> Any:
        """A table with a `kind`. Its other keys are the fields of that kind."""
        inner = _Table(self.take(key, dict[str, Any], "a table with a kind"), f"{self._where}: {key}")
        kind = inner.take("kind", Literal[tuple(kinds)], f"one of {', '.join(kinds)}")
        values: dict[str, Any] = {}
        for field in fields(kinds[kind]):
            default = None if field.default is MISSING else field.default
            if field.type == "Length":
                values[field.name] = inner.length(field.name, default)
            elif field.type == "int":
                values[field.name] = inner.count(field.name, default)
            else:
                least = 0.0 if field.name in ("within", "think") else 1e-6
                values[field.name] = inner.number(field.name, default, least=least)
        inner.done()
        return kinds[kind](**values)
