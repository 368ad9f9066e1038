"""Why a look-up hit or missed: one reason and one sentence per request.

Owns the reasons and their words. A look-up is judged when its PrefixLookup arrives, from the events so far: a later
eviction must not change the reason of an earlier miss. Reads the state and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from kvtop.state.history import History, Stored
    from kvtop.state.request_view import RequestView

Reason = Literal[
    "none",
    "never_seen",
    "diverged",
    "template_rewrote_history",
    "evicted",
    "shorter_than_block",
    "last_token",
    "salt",
    "reset",
    "in_flight",
]


@dataclass(frozen=True, slots=True)
class Evicted:
    """by: the request that took the memory. hits: how often the block was read before."""

    seconds_ago: float
    by: int | None
    hits: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """One look-up.

    first_miss_block: index in the prompt; None if no full block missed. divergence_token: the first prompt token that
    differs from the most similar earlier prompt. missing_tokens: prompt tokens that had to be computed. `short` is for
    the look-up strip; `sentence` needs no context.
    """

    hit_blocks: int
    queried_blocks: int
    first_miss_block: int | None
    reason: Reason
    divergence_token: int | None
    evicted: Evicted | None
    missing_tokens: int
    sentence: str
    short: str

    def row(self, request_id: int) -> dict[str, Any]:
        """The object of `kvtop explain --json`; what does not apply is absent."""
        row = {"id": request_id, **asdict(self)}
        del row["short"]
        return {k: v for k, v in row.items() if v is not None}


Found = Callable[..., Explanation]


@dataclass(slots=True)
class Look:
    """What `judge` gets: the request with its look-up, and the state at that moment."""

    view: RequestView
    block_size: int
    t: float
    history: History
    running: Iterable[RequestView]
    """The other running requests."""
    request_of: dict[int, int]
    """Sequence id -> request id, where it is known."""


def judge(look: Look) -> Explanation:
    """Reason and words for one look-up."""
    view = look.view
    i, asked, total = view.hit_blocks, view.lookup_hashes, view.prompt_tokens
    missing = total - view.hit_tokens

    def found(
        reason: Reason,
        short: str,
        sentence: str,
        *,
        miss: int | None = i,
        token: int | None = None,
        evicted: Evicted | None = None,
    ) -> Explanation:
        return Explanation(i, view.queried_blocks, miss, reason, token, evicted, missing, sentence, short)

    if i >= len(asked):
        return _all_read(look, missing, found)
    record = look.history.get(asked[i])
    if record is not None and record.gone is not None:
        return _gone(look, record, found)
    rival = _rival(look, asked[i], i)
    if record is not None or rival is not None:
        who = f"Request #{rival}" if rival is not None else "Another request"
        return found(
            "in_flight",
            "first miss: being computed now",
            f"{who} is computing the same tokens right now; block {i} could not be shared yet.",
        )
    return _new_text(look, missing, found)


def _all_read(look: Look, missing: int, found: Found) -> Explanation:
    """Every full block that was asked for is there; why some tokens are computed all the same."""
    size, total, i = look.block_size, look.view.prompt_tokens, look.view.hit_blocks
    if total and total % size == 0:
        return found(
            "last_token",
            "last block computed again",
            "The last block is computed again even if it is cached: predicting the next token needs at "
            "least one computed token.",
            miss=total // size - 1,
        )
    if total < size:
        return found(
            "shorter_than_block",
            "shorter than a block",
            f"The prompt has {total} tokens and only full blocks of {size} are cached.",
            miss=None,
        )
    return found(
        "none",
        "all full blocks read",
        f"All {i} full blocks were read from the cache; the last {missing} tokens do not fill a block "
        "and are always computed.",
        miss=None,
    )


def _new_text(look: Look, missing: int, found: Found) -> Explanation:
    """The first missing block is in no table and never was: what is the nearest that was?"""
    view, size = look.view, look.block_size
    i, asked, total = view.hit_blocks, view.lookup_hashes, view.prompt_tokens
    here = _tokens(view, i, size)
    parent = asked[i - 1] if i else look.history.root
    kin = look.history.children(parent) if parent is not None else []
    if not i:
        if here and any(k.salt != view.salt and k.token_ids == here for k in kin):
            return found(
                "salt",
                "first miss: cached under another salt",
                "The same tokens are cached under another salt; requests share blocks only within one salt.",
            )
        kin = [k for k in kin if k.salt == view.salt]
    shared = max((_common(k.token_ids, here) for k in kin), default=0)
    token = i * size + shared if kin and here else None
    if view.template_rewrote_history:
        return found(
            "template_rewrote_history",
            "first miss: the template rewrote earlier turns",
            "The chat template wrote the earlier turns differently this time (it drops the thinking of past "
            f"answers), so the cached text matches only up to token {i * size if token is None else token}.",
            token=token,
        )
    if kin and (i or shared or not here):
        return _diverged(view, token, missing, found)
    if i:
        return found(
            "never_seen",
            "first miss: new text",
            f"The first {view.hit_tokens:,} tokens were read from the cache; what follows is new text.",
        )
    return found(
        "never_seen",
        "first miss: never seen",
        f"No earlier prompt began with these tokens, so all {total:,} had to be computed.",
    )


def _gone(look: Look, record: Stored, found: Found) -> Explanation:
    assert record.gone is not None
    gone, i = record.gone, record.place
    ago = max(0.0, look.t - gone.t)
    if gone.why == "reset":
        return found(
            "reset",
            f"first miss: cache cleared {ago:.1f} s ago",
            f"Block {i} was cached until the prefix cache was cleared {ago:.1f} s ago.",
        )
    by = None if gone.by_seq is None else look.request_of.get(gone.by_seq)
    evicted = Evicted(round(ago, 3), by, gone.hits)
    if gone.why == "reallocated":
        who = f"#{by}" if by is not None else "another request"
        read = "never read" if not gone.hits else f"read {gone.hits} time{'s' * (gone.hits > 1)}"
        return found(
            "evicted",
            f"first miss: evicted {ago:.1f} s ago by {who}",
            f"Block {i} was cached, but {who} needed the memory {ago:.1f} s ago; it had been {read}.",
            evicted=evicted,
        )
    what = "its step did not run" if gone.why == "unwritten" else "its content proved bad"
    return found(
        "evicted",
        f"first miss: withdrawn {ago:.1f} s ago",
        f"Block {i} was withdrawn from the cache {ago:.1f} s ago, because {what}.",
        evicted=evicted,
    )


def _diverged(
    view: RequestView, token: int | None, missing: int, found: Callable[..., Explanation]
) -> Explanation:
    if token is None:
        return found(
            "diverged",
            "first miss: the text differs",
            f"An earlier prompt continues with other text after {view.hit_blocks} blocks; "
            f"{missing:,} tokens were computed.",
        )
    role, name = view.role_at(token)
    where = f" (in {name})" if name else ""
    is_turn = role == "user" and not any(start > token and r == "user" for start, _, r, _ in view.spans)
    return found(
        "diverged",
        "first miss: new text" if is_turn else f"first miss: differs at token {token:,}{where}",
        f"The prompt equals an earlier one up to token {token:,}; from there on the text differs{where}. "
        f"Only full blocks can be read, so {missing:,} tokens were computed.",
        token=token,
    )


def _tokens(view: RequestView, block: int, size: int) -> tuple[int, ...]:
    here = view.prompt_token_ids[block * size : (block + 1) * size]
    return tuple(here) if len(here) == size else ()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _rival(look: Look, wanted: str, block: int) -> int | None:
    for other in look.running:
        hashes = other.lookup_hashes
        if other is not look.view and block < len(hashes) and hashes[block] == wanted:
            return other.request_id
    return None
