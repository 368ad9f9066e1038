"""Rows: the table of all requests, and the two queues that they are in.

Owns the rows by request id, which requests wait and which run, and how many finished ones are kept. Reads like a
dictionary. Invariants: `waiting` is in the order in which the engine will admit the requests, as far as the events say;
a request that is queued or preempted is in `waiting`, one that runs is in `running`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, ValuesView
from contextlib import suppress

from kvtop.state.part import Part
from kvtop.state.request_view import RequestView
from kvtop.state.requests.branches import Branches, SequenceView

MOST_FINISHED = 10_000
"""Finished requests that are kept."""


class Rows(Part):
    """See the module."""

    __slots__ = ("_finished", "_rows", "branches", "running", "waiting")

    def __init__(self) -> None:
        self.branches = Branches()
        self.waiting: list[int] = []
        """Request ids; the first one is admitted next."""
        self.running: list[int] = []
        self._rows: dict[int, RequestView] = {}
        self._finished: deque[int] = deque()

    def __getitem__(self, request_id: int) -> RequestView:
        return self._rows[request_id]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._rows

    def __iter__(self) -> Iterator[int]:
        return iter(self._rows)

    def __reversed__(self) -> Iterator[int]:
        return reversed(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, request_id: int | None) -> RequestView | None:
        """The row; None if there is none."""
        return None if request_id is None else self._rows.get(request_id)

    def values(self) -> ValuesView[RequestView]:
        """Rows, oldest first."""
        return self._rows.values()

    @property
    def sequences(self) -> dict[int, SequenceView]:
        """Branches that are alive, by sequence id."""
        return self.branches.alive

    def of_sequence(self, seq_id: int) -> int | None:
        """The request of a sequence, also after its end. None: unknown."""
        return self.branches.request_of.get(seq_id)

    def tokens(self, seq_id: int, start: int, end: int) -> tuple[int, ...]:
        """Tokens [start, end) of a sequence that is alive; () where they are not known."""
        view = self.get(self.of_sequence(seq_id))
        if seq_id not in self.sequences or view is None or not view.prompt_token_ids:
            return ()
        n = view.prompt_tokens
        output = view.written[seq_id].ids if seq_id in view.written else []
        return (*view.prompt_token_ids[start:end], *output[max(0, start - n) : max(0, end - n)])

    # ------------------------------------------------------------------------------------- inside

    def _sequence(self, seq_id: int) -> SequenceView:
        return self.branches.at(seq_id, self._rows)

    def _wait(self, request_id: int, position: int) -> None:
        """Put a request into the waiting queue. -1 is the end: an older recording does not say where."""
        self.waiting.insert(position if position >= 0 else len(self.waiting), request_id)

    def _leave(self, view: RequestView) -> None:
        """Take a request out of its queue. Only the one that its phase names is searched, from the front, where the
        engine takes requests from."""
        queue = self.running if view.phase == "running" else self.waiting
        with suppress(ValueError):
            queue.remove(view.request_id)

    def _close(self, view: RequestView, reason: str | None) -> None:
        self._leave(view)
        view.finish_reason = reason
        view.phase, view.chunk, view.blocked = "finished", None, None
        view.close_branches()
        self.branches.stop_counting(view.request_id)
        self._finished.append(view.request_id)
        if len(self._finished) > MOST_FINISHED:
            old = self._rows.pop(self._finished.popleft(), None)
            if old is not None:
                self.branches.forget(old)
