"""Law of text: every token that is used is explained once, and what became visible is what its tokens say.

Owns the bytes of tokens, and of each branch the text of its tokens that is not visible yet. Which tokens are
invisible (control tokens) no event says: a token must be the one or the other throughout a stream.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

from engine import events as ev
from kvtop.record.audit.books import Books, need
from kvtop.record.audit.law import Law, takes


@dataclass(slots=True)
class _Output:
    """Of one branch: (token, its text) that is not visible yet, and the bytes of a half character."""

    waiting: list[tuple[int, str]] = field(default_factory=list)
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def fork(self) -> _Output:
        other = _Output(self.waiting[:])
        other.decoder.setstate(self.decoder.getstate())
        return other


class TextLaw(Law):
    """Nothing is asked of a redacted recording."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._off = books.redacted or not books.has_text
        self._pieces: dict[int, bytes] = {}
        self._used: set[int] = set()
        """Tokens of this batch."""
        self._new: set[int] = set()
        """Tokens that this batch explains."""
        self._outputs: dict[int, _Output] = {}
        self._visible: set[int] = set()
        self._invisible: set[int] = set()

    @takes(ev.TokenPieces)
    def pieces(self, e: ev.TokenPieces) -> None:
        """Once each."""
        need(len(e.ids) == len(e.bytes), "columns of different lengths")
        again = self._pieces.keys() & set(e.ids)
        self._pieces.update(zip(e.ids, e.bytes, strict=True))
        self._new.update(e.ids)
        need(not again and len(set(e.ids)) == len(e.ids), f"token {min(again, default=0)} is explained twice")

    @takes(ev.RequestQueued)
    def queued(self, e: ev.RequestQueued) -> None:
        """The prompt's tokens are used."""
        self._used.update(e.prompt_token_ids)

    @takes(ev.TokenLogprobs)
    def logprobs(self, e: ev.TokenLogprobs) -> None:
        """So are those that were likely."""
        self._used.update(*e.top_ids)

    @takes(ev.SequenceForked)
    def forked(self, e: ev.SequenceForked) -> None:
        """The child goes on from the parent's text."""
        if e.parent in self._outputs:
            self._outputs[e.child] = self._outputs[e.parent].fork()

    @takes(ev.TokensSampled)
    def sampled(self, e: ev.TokensSampled) -> None:
        """What is visible now was said by tokens up to now."""
        self._used.update(e.token_ids)
        if self._off:
            return
        at, wrong = 0, []
        for i, count, text in zip(e.seq_ids, e.counts, e.text, strict=True):
            tokens = e.token_ids[at : at + count]
            at += count
            output = self._outputs.setdefault(i, _Output())
            output.waiting += [(t, output.decoder.decode(self._pieces.get(t, b""))) for t in tokens]
            if not self._shown(output, text):
                wrong.append(i)
        need(not wrong, f"the text of sequence {wrong[:1]} is not what its tokens say")

    def _shown(self, output: _Output, text: str) -> bool:
        """Takes `text` off what waits; tokens that it passes over are invisible."""
        waiting, at = output.waiting, 0
        right = True
        while text and at < len(waiting):
            token, said = waiting[at]
            if said and text.startswith(said):
                right &= token not in self._invisible
                self._visible.add(token)
                text = text[len(said) :]
            elif said and said.startswith(text):  # the rest may become a stop text
                waiting[at], text = (token, said[len(text) :]), ""
                break
            elif said:
                right &= token not in self._visible
                self._invisible.add(token)
            at += 1
        del waiting[:at]
        # A half character at the very end reads as U+FFFD.
        return right and (not text or text == output.decoder.decode(b"", final=True))

    @takes(ev.RequestFinished)
    def finished(self, e: ev.RequestFinished) -> None:
        """All of it was shown, unless a stop text or an error cut it short."""
        life = self.books.life(e.request_id)
        outputs = [self._outputs.pop(b.seq_id, None) for b in life.branches]
        if self._off or e.reason not in ("stop", "length") or life.queued.params.get("stop") or life.searches:
            return
        for output in outputs:
            if output is not None:
                kept = [token for token, said in output.waiting if said and token in self._visible]
                # The token that ended it is never shown.
                last = output.waiting[-1:] if e.reason == "stop" else []
                need(
                    not kept or kept == [t for t, _ in last], f"the text of token {kept[:1]} was never shown"
                )

    def end_batch(self, batch: ev.StepBatch) -> None:
        """Every token is explained in the batch that uses it first, and no other."""
        used, self._used = self._used, set()
        new, self._new = self._new, set()
        if self._off:
            return
        missing = {t for t in used if t >= 0} - self._pieces.keys()
        self._pieces.update(dict.fromkeys(missing, b""))
        need(not missing, f"TokenPieces is missing for token {min(missing, default=0)}")
        need(new <= used, f"token {min(new - used, default=0)} is explained, but not used")
