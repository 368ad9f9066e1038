"""RequestView and SequenceView: what the events have said about a request and its branches so far.

Owns the rows behind the chat, the queues, the look-up strip and the headless summary, and their changes. Only the
part Requests calls for changes; a finished row is never changed again, so copies of the state share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from engine.events import AdmissionBlocked, PrefixLookup, RequestFinished, Usage
from kvtop.state.explain import Explanation
from kvtop.state.part import Copied
from kvtop.state.series import percentile
from kvtop.units import count, percent

Phase = Literal["queued", "running", "preempted", "finished"]
PromptSpan = tuple[int, int, str, str]
"""(start, end, role, name) over prompt tokens."""


@dataclass(slots=True, eq=False)
class SequenceView(Copied):
    """One branch that lives; its block table is the pool's."""

    seq_id: int
    request_id: int | None = None
    """None until RequestAdmitted names it."""
    num_computed: int = 0
    """Tokens whose KV is written."""
    branch: int = 0
    """Its place among the branches of the request; the first one is read as the answer."""
    pruned: bool = False
    """A beam that was dropped."""
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    t_last: float | None = None
    evicted_ids: list[int] = field(default_factory=list)
    """Blocks whose content was thrown out for this sequence."""

    def follow(self, parent: SequenceView) -> None:
        """Begin with all that the parent has."""
        self.num_computed = parent.num_computed
        self.output_ids, self.text, self.t_last = parent.output_ids[:], parent.text, parent.t_last


@dataclass(slots=True, eq=False)
class RequestView(Copied):
    """One request. Instants are on the batches' clock, in seconds; None where it never got there."""

    SHARED: ClassVar[frozenset[str]] = frozenset(
        {"prompt_token_ids", "spans", "params", "lookup_hashes", "explanation"}
    )

    request_id: int
    t_arrival: float
    prompt_token_ids: list[int]
    """Empty in a redacted recording; `prompt_tokens` holds all the same."""
    prompt_tokens: int
    spans: list[PromptSpan] = field(default_factory=list)
    """(start, end, role, name) over prompt tokens."""
    params: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    priority: int = 0
    salt: str | None = None
    conversation: int | None = None

    phase: Phase = "queued"
    seq_ids: list[int] = field(default_factory=list)
    """Its branches; dropped beams are not among them."""
    dropped_ids: list[int] = field(default_factory=list)
    held_peak: int = 0
    """Most blocks that its branches held together, where there are several; each block once."""
    unshared_peak: int = 0
    """The same if every branch had blocks of its own."""
    num_computed: int = 0
    """Of branch 0."""
    chunk: tuple[int, int] | None = None
    """(start, n) of the prompt tokens that the last step computed; None while decoding."""
    output_ids: list[int] = field(default_factory=list)
    """Tokens of branch 0."""
    num_output: int = 0
    """Tokens sampled over all branches."""
    text: str = ""
    """Visible text of branch 0, of beams the first that was not dropped; `texts` has every branch."""
    texts: dict[int, str] = field(default_factory=dict)

    lookup_hashes: list[str] = field(default_factory=list)
    """Hash of every full block that the first look-up asked for."""
    hit_blocks: int = 0
    queried_blocks: int = 0
    hit_tokens: int = 0
    hit_ids: list[int] = field(default_factory=list)
    """Physical blocks read at the first admission, in prompt order."""
    looked_up: bool = False
    t_lookup: float | None = None
    template_rewrote_history: bool = False
    explanation: Explanation | None = None
    """Why the first look-up read what it read, judged at that moment."""
    cached_tokens: int = 0
    """Tokens read from the cache at the first admission."""

    t_admitted: float | None = None
    t_first: float | None = None
    t_last: float | None = None
    t_finished: float | None = None
    slow: bool = False
    """Slow motion stretched a step before its first token: its TTFT is no measurement."""
    crowded: bool = False
    """Others were under way when it arrived: its TTFT is also theirs."""
    itl: list[float] = field(default_factory=list)
    """Seconds between tokens, steps in slow motion left out."""

    preemptions: int = 0
    tokens_lost: int = 0
    """Computed tokens that preemptions took from it."""
    tokens_back: int = 0
    """Of those, how many it read from the cache when it resumed; the rest is computed again."""
    resumed: int = 0
    """Admissions after a preemption."""
    evicted_ids: list[int] = field(default_factory=list)
    """Blocks whose content was thrown out for this request."""
    blocked: AdmissionBlocked | None = None
    """Why it cannot be admitted, while that is so."""
    last_table: list[int] = field(default_factory=list)
    """Branch 0's table before it was given up."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """Of branch 0's tokens, where it asked: token, text, logprob, and the same of the likeliest in `top`."""
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.t_first is None else self.t_first - self.t_arrival

    @property
    def queue_s(self) -> float | None:
        """Seconds from arrival to the first admission."""
        return None if self.t_admitted is None else self.t_admitted - self.t_arrival

    @property
    def width(self) -> int:
        """Samples or beams that it asked for."""
        return max(self.n, int(self.params.get("beam_width") or 1))

    @property
    def saved(self) -> float | None:
        """Part of the blocks that sharing saved, 0..1; None for a single branch."""
        return 1 - self.held_peak / self.unshared_peak if self.unshared_peak else None

    def sharing(self) -> str:
        """What its branches held at most, against blocks of their own, in words."""
        who = (
            f"{self.n} samples" if self.n > 1 else f"{self.width} beams" if self.width > 1 else "its branches"
        )
        return (
            f"{who} held {count(self.held_peak)} blocks, {count(self.unshared_peak)} without sharing: "
            f"{percent(self.saved)} saved"
        )

    def branch_texts(self) -> list[str]:
        """Visible text of each branch, in their order."""
        return [self.texts.get(i, "") for i in self.seq_ids]

    @property
    def done(self) -> bool:
        """No event about it will come any more."""
        return self.phase == "finished"

    @property
    def is_cold(self) -> bool:
        """Its look-up is over and nothing was read."""
        return self.looked_up and not self.hit_tokens

    def role_at(self, token: int) -> tuple[str, str]:
        """(role, name) of the span that covers this prompt token; ("", "") outside all of them."""
        for start, end, role, name in self.spans:
            if start <= token < end:
                return role, name
        return "", ""

    def copy(self) -> Self:
        """An independent row; a finished one is shared, since nothing changes it any more."""
        return self if self.done else super(RequestView, self).copy()

    # ------------------------------------------------------------------------------------ changes

    def look_up(self, e: PrefixLookup, t: float) -> None:
        """The first look-up."""
        self.looked_up, self.t_lookup = True, t
        self.prompt_tokens = e.prompt_tokens
        self.lookup_hashes, self.hit_blocks, self.queried_blocks = e.hashes, e.hit_blocks, e.queried_blocks
        self.hit_tokens, self.template_rewrote_history = e.hit_tokens, e.template_rewrote_history

    def add_branch(self, seq_id: int) -> int:
        """Returns its place among the branches."""
        if seq_id not in self.seq_ids:
            self.seq_ids.append(seq_id)
        return self.seq_ids.index(seq_id)

    def drop_branch(self, seq_id: int) -> None:
        """A beam was pruned."""
        self.seq_ids.remove(seq_id)
        self.texts.pop(seq_id, None)
        self.dropped_ids.append(seq_id)

    def read_from(self, sequence: SequenceView) -> None:
        """This branch is the answer now."""
        self.output_ids, self.text = sequence.output_ids[:], sequence.text
        self.num_computed = sequence.num_computed

    def resume(self, cached_tokens: int) -> int:
        """Admitted again. Returns how many of the lost tokens the cache gave back."""
        self.resumed += 1
        back = min(cached_tokens, self.tokens_lost - self.tokens_back)
        self.tokens_back += back
        return back

    def preempt(self, tokens_lost: int) -> None:
        """Back to the waiting ones."""
        self.phase, self.chunk, self.num_computed = "preempted", None, 0
        self.preemptions += 1
        self.tokens_lost += tokens_lost

    def grow(self, sequence: SequenceView, count: int, tokens: list[int], text: str) -> None:
        """A step computed this branch and sampled `count` tokens; a redacted recording does not say which."""
        sequence.output_ids += tokens
        sequence.text += text
        self.num_output += count
        if sequence.branch == 0:
            self.num_computed = sequence.num_computed
            self.output_ids += tokens
            self.text += text
        if text:
            self.texts[sequence.seq_id] = sequence.text

    def count_blocks(self, tables: list[list[int]]) -> None:
        """The tables of its branches at one moment."""
        self.held_peak = max(self.held_peak, len(set().union(*tables)))
        self.unshared_peak = max(self.unshared_peak, sum(map(len, tables)))

    def finish(self, e: RequestFinished, t: float) -> None:
        """What the engine says at the end."""
        self.usage, self.error = e.usage, e.error
        if self.dropped_ids:  # what pruned beams sampled is no output
            self.num_output = e.usage.output_tokens
        at = e.timings
        self.t_arrival, self.t_admitted = at.t_arrival, at.t_admitted
        self.t_first, self.t_last = at.t_first_token, at.t_last_token
        self.t_finished = t if at.t_finished is None else at.t_finished

    # ------------------------------------------------------------------------------------ summary

    def summary(self) -> dict[str, Any]:
        """The row of the headless summary. Milliseconds; a figure that does not exist is absent."""
        usage = self.usage
        row: dict[str, Any] = {
            "id": self.request_id,
            "text": self.text,
            "texts": self.branch_texts() if self.n > 1 else None,
            "prompt_tokens": usage.prompt_tokens if usage else self.prompt_tokens,
            "cached_tokens": usage.cached_tokens if usage else self.cached_tokens,
            "computed_tokens": usage.computed_tokens if usage else self.num_computed - self.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens if usage else 0,
            "output_tokens": usage.output_tokens if usage else self.num_output,
            "finish_reason": self.finish_reason,
            "queue_ms": _ms(self.queue_s),
            "ttft_ms": _ms(self.ttft),
            "itl_ms": {"p50": _ms(percentile(self.itl, 50)), "p99": _ms(percentile(self.itl, 99))}
            if self.itl
            else None,
            "preemptions": usage.preemptions if usage else self.preemptions,
            "recomputed_tokens": usage.recomputed_tokens if usage else 0,
            "lost_tokens": self.tokens_lost if self.preemptions else None,
            "returned_tokens": self.tokens_back if self.preemptions else None,
            "logprobs": self.logprobs or None,
            "blocks": {"held": self.held_peak, "without_sharing": self.unshared_peak}
            if self.unshared_peak
            else None,
            "error": self.error,
        }
        return {k: v for k, v in row.items() if v is not None}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
