"""Law of endings: the reason of an end agrees with the tokens of the request.

Owns which tokens ended a request. No event has the model's end tokens. But if a token that is not a stop token of its
request ended one request, it must end every request that does not ignore end tokens.
"""

from __future__ import annotations

from engine import events as ev
from kvtop.record.audit.books import Books, Branch, Life, need
from kvtop.record.audit.law import Law, takes


class EndingLaw(Law):
    """A beam search ends by its hypotheses, which are in no event, so only its length is checked."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._ends: dict[int, int] = {}
        """Token that ended a request -> the request."""
        self._passed: set[int] = set()
        """Tokens after which a request continued that does not ignore end tokens."""
        self._last: dict[int, int] = {}
        """Last token of a request that ended for another reason -> the request."""

    @takes(ev.TokensSampled)
    def sampled(self, e: ev.TokensSampled) -> None:
        """Never more tokens than were asked for, or than fit in the context."""
        for i in e.seq_ids:
            branch = self.books.branch(i)
            most = self._most(branch.request)
            output = branch.length - branch.request.prompt
            need(output <= most, f"sequence {i} has {output} tokens of at most {most}")

    @takes(ev.RequestFinished)
    def finished(self, e: ev.RequestFinished) -> None:
        """The reason of the end, as far as tokens show it."""
        life = self.books.life(e.request_id)
        never = not life.branches
        failed = e.reason in ("error", "refused") or (e.reason == "abort" and never)
        need(e.error is None or failed, f"{e.reason}, but it has an error")
        need(e.error is not None or e.reason not in ("error", "refused"), f"{e.reason} without an error text")
        if never or life.searches:
            return
        branch = life.branches[0]
        output = branch.length - life.prompt
        full = output >= self._most(life)
        need(e.reason != "length" or full, f"ended by length after {output} of {self._most(life)} tokens")
        over = all(b.length - life.prompt >= self._most(life) for b in life.branches)
        need(e.reason != "abort" or not over, "aborted, but all its tokens had been sampled")
        parted = life.queued.n if e.reason in ("stop", "length") else 0
        need(len(life.branches) >= parted, f"{len(life.branches)} of {parted} samples exist")
        if not self.books.redacted and output > 0:
            self._note(e, life, branch)

    def _note(self, e: ev.RequestFinished, life: Life, branch: Branch) -> None:
        params = life.queued.params
        *passed, last = branch.tokens[life.prompt :]
        heeds = not params.get("ignore_eos")
        if heeds:
            self._passed.update(passed)
        own = last in (params.get("stop_token_ids") or ())
        need(
            not own or e.reason in ("stop", "error"),
            f"ended by {e.reason}, but its last token is a stop token",
        )
        if e.reason == "stop" and not own and not params.get("stop"):
            need(heeds, "ended by a token, but it ignores end tokens")
            self._ends.setdefault(last, e.request_id)
        elif heeds and (e.reason == "length" or (e.reason == "abort" and len(life.branches) == 1)):
            self._last.setdefault(last, e.request_id)

    def close(self) -> None:
        """A token that ended one request ends all requests."""
        for token, request_id in self._ends.items():
            need(
                token not in self._passed,
                f"token {token} ended request {request_id}, but another one continued after it",
            )
            other = self._last.get(token)
            need(other is None, f"token {token} ended request {request_id}, but not request {other}")

    def _most(self, life: Life) -> int:
        asked = life.queued.params.get("max_tokens")
        room = self.books.max_model_len - life.prompt
        return min(asked, room) if type(asked) is int else room
