"""Speculation by prompt lookup: tokens that probably come next, read off what the sequence said before.

Owns the proposals alone. A forward computes them behind the newest token and samples after each of them; the
core keeps those that the samples agree with, so the output is, token for token, what it would be without.
No draft ever passes max_tokens or the context, and a request whose logits are shaped gets none.
"""

from __future__ import annotations

from array import array

from engine.step.sequence import Sequence

LONGEST, SHORTEST = 4, 2
"""Tokens of the tail that is looked for; a longer one is the better witness and is tried first."""


def propose(tokens: array[int], most: int) -> tuple[int, ...]:
    """At most `most` tokens that followed the last earlier occurrence of the tail; none without one."""
    size, data = tokens.itemsize, tokens.tobytes()
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        tail = data[-length * size :]
        at = data.rfind(tail, 0, -size)
        while at > 0 and at % size:  # bytes of two tokens that only look like one
            at = data.rfind(tail, 0, at + len(tail) - 1)
        if at >= 0:
            start = at // size + length
            return tuple(tokens[start : start + most])
    return ()


class PromptLookup:
    """Drafts for decoding sequences: `most` a step and sequence."""

    def __init__(self, most: int, max_model_len: int) -> None:
        self.most = most
        self._limit = max_model_len

    def drafts(self, seq: Sequence, room: int) -> tuple[int, ...]:
        """For a sequence whose newest token alone is not computed; at most `room` of them."""
        request = seq.request
        if not self.most or request.search is not None or request.params.shapes_logits:
            return ()
        output = len(seq) - request.prompt_tokens
        # Besides the drafts there is always one more token: the sample after the last accepted one.
        most = min(self.most, room, request.params.max_tokens - output - 1, self._limit - len(seq) - 1)
        return propose(seq.tokens, most) if most > 0 else ()
