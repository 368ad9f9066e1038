"""Law of text: the bytes of every used token are given once, and the visible text is that of the tokens.

Owns the bytes of tokens, and the text of each branch that is not visible yet. No event says which tokens are invisible
(control tokens). But a token must be visible or invisible in the whole stream.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

from engine import events as ev
from kvtop.record.audit.books import Books, need
from kvtop.record.audit.law import Law, takes


@dataclass(slots=True)
class _Output:
    """waiting: (token, its text) of one branch that is not visible yet. decoder: has the bytes of a half character."""

    waiting: list[tuple[int, str]] = field(default_factory=list)
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )

    def fork(self) -> _Output:
        other = _Output(self.waiting[:])
        other.decoder.setstate(self.decoder.getstate())
        return other


class TextLaw(Law):
    """A redacted recording is not checked."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        self._off = books.redacted or not books.has_text
        self._pieces: dict[int, bytes] = {}
        self._used: set[int] = set()
        """Tokens that this batch uses."""
        self._new: set[int] = set()
        """Tokens whose bytes this batch gives."""
        self._outputs: dict[int, _Output] = {}
        self._visible: set[int] = set()
        self._invisible: set[int] = set()

    @takes(ev.TokenPieces)
    def pieces(self, e: ev.TokenPieces) -> None:
        """The bytes of each token are given once."""
        need(len(e.ids) == len(e.bytes), "columns of different lengths")
        again = self._pieces.keys() & set(e.ids)
        self._pieces.update(zip(e.ids, e.bytes, strict=True))
        self._new.update(e.ids)
        need(
            not again and len(set(e.ids)) == len(e.ids),
            f"token {min(again, default=0)} has its bytes given twice",
        )

    @takes(ev.RequestQueued)
    def queued(self, e: ev.RequestQueued) -> None:
        """The tokens of a prompt are used."""
        self._used.update(e.prompt_token_ids)

    @takes(ev.TokenLogprobs)
    def logprobs(self, e: ev.TokenLogprobs) -> None:
        """The likeliest tokens are used."""
        self._used.update(*e.top_ids)

    @takes(ev.SequenceForked)
    def forked(self, e: ev.SequenceForked) -> None:
        """A child continues the text of its parent."""
        if e.parent in self._outputs:
            self._outputs[e.child] = self._outputs[e.parent].fork()

    @takes(ev.TokensSampled)
    def sampled(self, e: ev.TokensSampled) -> None:
        """The visible text is that of the tokens so far."""
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
        need(not wrong, f"the text of sequence {wrong[:1]} is not that of its tokens")

    def _shown(self, output: _Output, text: str) -> bool:
        """Removes `text` from the waiting text. A token that is skipped is invisible."""
        waiting, at = output.waiting, 0
        right = True
        while text and at < len(waiting):
            token, said = waiting[at]
            if said and text.startswith(said):
                right &= token not in self._invisible
                self._visible.add(token)
                text = text[len(said) :]
            elif said and said.startswith(text):  # the rest may become part of a stop string
                waiting[at], text = (token, said[len(text) :]), ""
                break
            elif said:
                right &= token not in self._visible
                self._invisible.add(token)
            at += 1
        del waiting[:at]
        # A half character at the end of the text is U+FFFD.
        return right and (not text or text == output.decoder.decode(b"", final=True))

    @takes(ev.RequestFinished)
    def finished(self, e: ev.RequestFinished) -> None:
        """All text was shown, unless a stop string or an error ended it."""
        life = self.books.life(e.request_id)
        outputs = [self._outputs.pop(b.seq_id, None) for b in life.branches]
        if self._off or e.reason not in ("stop", "length") or life.queued.params.get("stop") or life.searches:
            return
        for output in outputs:
            if output is not None:
                kept = [token for token, said in output.waiting if said and token in self._visible]
                # The token that ended the request is never shown.
                last = output.waiting[-1:] if e.reason == "stop" else []
                need(
                    not kept or kept == [t for t, _ in last], f"the text of token {kept[:1]} was never shown"
                )

    def end_batch(self, batch: ev.StepBatch) -> None:
        """The bytes of a token are in the batch that uses it first, and only there."""
        used, self._used = self._used, set()
        new, self._new = self._new, set()
        if self._off:
            return
        missing = {t for t in used if t >= 0} - self._pieces.keys()
        self._pieces.update(dict.fromkeys(missing, b""))
        need(not missing, f"TokenPieces is missing for token {min(missing, default=0)}")
        need(new <= used, f"token {min(new - used, default=0)} has its bytes given, but is not used")
