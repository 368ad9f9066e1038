"""RequestView: what the events have said about one request so far.

Owns the row behind the chat, the queues, the look-up strip and the headless summary, and how it changes. Only the
part Requests changes a row. Invariant: a finished row never changes again, so copies of the state share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from engine.events import AdmissionBlocked, PrefixLookup, RequestFinished, Usage
from kvtop.state.explain import Explanation
from kvtop.state.part import Copied
from kvtop.state.requests.written import Written
from kvtop.state.series import percentile
from kvtop.units import count, percent

if TYPE_CHECKING:
    from kvtop.state.requests.branches import SequenceView

Phase = Literal["queued", "running", "preempted", "finished"]
PromptSpan = tuple[int, int, str, str]
"""(start, end, role, name) over prompt tokens."""


@dataclass(slots=True, eq=False)
class RequestView(Copied):
    """One request. Instants are in seconds on the batches' clock; None where the request never got so far."""

    SHARED: ClassVar[frozenset[str]] = frozenset(
        {"prompt_token_ids", "spans", "params", "lookup_hashes", "explanation"}
    )

    request_id: int
    t_arrival: float
    prompt_token_ids: list[int]
    """Empty in a redacted recording, which still has `prompt_tokens`."""
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
    """Its branches, without the beams that were dropped."""
    dropped_ids: list[int] = field(default_factory=list)
    held_peak: int = 0
    """Most blocks that its branches held together, a shared block counted once; 0 for a single branch."""
    unshared_peak: int = 0
    """Most blocks that the branches would have held without sharing."""
    num_computed: int = 0
    """Tokens of branch 0 whose KV is written."""
    chunk: tuple[int, int] | None = None
    """(start, n) of the prompt tokens that the last step computed; None while decoding."""
    written: dict[int, Written] = field(default_factory=dict)
    """What each of its branches wrote, by sequence id."""
    num_output: int = 0
    """Tokens sampled over all branches."""

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
    """Why the first look-up found what it found, judged at that moment."""
    cached_tokens: int = 0
    """Tokens read from the cache at the first admission."""

    t_admitted: float | None = None
    t_first: float | None = None
    t_last: float | None = None
    t_finished: float | None = None
    slow: bool = False
    """Slow motion made a step before its first token longer: its TTFT measures nothing."""
    crowded: bool = False
    """Other requests were waiting or running when it arrived: its TTFT depends on them."""
    itl: list[float] = field(default_factory=list)
    """Seconds between tokens, without the steps in slow motion."""

    preemptions: int = 0
    tokens_lost: int = 0
    """Computed tokens whose KV its preemptions gave up."""
    tokens_back: int = 0
    """Those of them that it read from the cache when it resumed. The rest is computed again."""
    resumed: int = 0
    """Admissions after a preemption."""
    evicted_ids: list[int] = field(default_factory=list)
    """Blocks whose content was evicted for this request."""
    blocked: AdmissionBlocked | None = None
    """Why it cannot be admitted now."""
    last_table: list[int] = field(default_factory=list)
    """The last block table of branch 0 before it was released."""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    """A row for each token of branch 0, if the request asks: token, text, logprob; `top`: the likeliest tokens."""
    usage: Usage | None = None
    finish_reason: str | None = None
    error: str | None = None

    @property
    def output_ids(self) -> list[int]:
        """Tokens of branch 0. The list grows; readers must not change it."""
        first = self._first
        return [] if first is None else first.ids

    @property
    def text(self) -> str:
        """Visible text of branch 0: the answer. Of beams, the first one that was not dropped."""
        first = self._first
        return "" if first is None else first.text

    @property
    def _first(self) -> Written | None:
        return self.written.get(self.seq_ids[0]) if self.seq_ids else None

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
        """Share of the blocks that sharing saved, 0..1. None for a single branch."""
        return 1 - self.held_peak / self.unshared_peak if self.unshared_peak else None

    def sharing(self) -> str:
        """The most blocks that its branches held, and what they would have held without sharing, in words."""
        who = (
            f"{self.n} samples" if self.n > 1 else f"{self.width} beams" if self.width > 1 else "its branches"
        )
        return (
            f"{who} held {count(self.held_peak)} blocks, {count(self.unshared_peak)} without sharing: "
            f"{percent(self.saved)} saved"
        )

    def branch_texts(self) -> list[str]:
        """Visible text of each branch, in their order."""
        return [self.written[i].text for i in self.seq_ids]

    @property
    def done(self) -> bool:
        """No more events about it will come."""
        return self.phase == "finished"

    @property
    def is_cold(self) -> bool:
        """It was looked up, and nothing was found."""
        return self.looked_up and not self.hit_tokens

    def role_at(self, token: int) -> tuple[str, str]:
        """(role, name) of the span that covers this prompt token; ("", "") outside all of them."""
        for start, end, role, name in self.spans:
            if start <= token < end:
                return role, name
        return "", ""

    def copy(self) -> Self:
        """An independent row. A finished one is shared, since nothing changes it."""
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
            self.written.setdefault(seq_id, Written())
        return self.seq_ids.index(seq_id)

    def drop_branch(self, seq_id: int) -> None:
        """A beam was pruned."""
        self.seq_ids.remove(seq_id)
        self.written.pop(seq_id, None)
        self.dropped_ids.append(seq_id)

    def fork(self, parent: int, child: int) -> None:
        """A new branch begins with what the parent wrote."""
        written = self.written.get(parent)
        self.written[child] = Written() if written is None else written.fork()

    def close_branches(self) -> None:
        """The request ends. What remains is the answer's tokens, and the text of every branch."""
        for place, i in enumerate(self.seq_ids):
            if place:
                self.written[i].forget_ids()
            else:
                self.written[i].join()

    def resume(self, cached_tokens: int) -> int:
        """Admitted again. Returns how many of the lost tokens the cache gave back."""
        self.resumed += 1
        back = min(cached_tokens, self.tokens_lost - self.tokens_back)
        self.tokens_back += back
        return back

    def preempt(self, tokens_lost: int) -> None:
        """It goes back to the waiting queue."""
        self.phase, self.chunk, self.num_computed = "preempted", None, 0
        self.preemptions += 1
        self.tokens_lost += tokens_lost

    def grow(self, sequence: SequenceView, count: int, tokens: list[int], text: str) -> None:
        """A step computed this branch and sampled `count` tokens. A redacted recording has no `tokens`."""
        self.num_output += count
        sequence.num_output += count
        if sequence.branch == 0:
            self.num_computed = sequence.num_computed
        written = self.written.get(sequence.seq_id)
        if written is not None:
            written.add(tokens, text)

    def finish(self, e: RequestFinished, t: float) -> None:
        """Take over what the engine says at the end."""
        self.usage, self.error = e.usage, e.error
        if self.dropped_ids:  # what dropped beams sampled does not count as output
            self.num_output = e.usage.output_tokens
        at = e.timings
        self.t_arrival, self.t_admitted = at.t_arrival, at.t_admitted
        self.t_first, self.t_last = at.t_first_token, at.t_last_token
        self.t_finished = t if at.t_finished is None else at.t_finished

    # ------------------------------------------------------------------------------------ summary

    def summary(self) -> dict[str, Any]:
        """The row of the headless summary. Times in milliseconds; a figure that does not exist is absent."""
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
