"""Speculation by prompt lookup: drafts of the next tokens, copied from an earlier place in the sequence.

Owns the proposals alone. A forward computes the drafts after the newest token and samples after each of them. The core
keeps the drafts that agree with the samples, so the output is that without drafts. Invariants: drafts never exceed
max_tokens or the context; a request whose logits are shaped gets none.
"""

from __future__ import annotations

from array import array

from engine.step.sequence import Sequence

LONGEST, SHORTEST = 4, 2
"""Tokens of the end of the sequence that is searched for. A longer match is more reliable and is tried first."""


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
