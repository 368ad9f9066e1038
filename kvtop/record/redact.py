"""Redactor: the same stream without any text.

Owns what is private: prompt, sampled and stored token ids, token bytes, text, names, stop strings, messages and the
hash seed. Each hash is replaced by a keyed hash of it, so a redacted stream can still be replayed and verified.
Invariant: no guess of the text can be confirmed by hashing it; verify cannot recompute the hashes either.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import Any, ClassVar

from msgspec.structs import replace

from engine import events as ev

_WORDS = {"stop", "stop_token_ids", "bad_words", "bad_word_ids", "logit_bias"}
"""Parameters of a request that may contain words of its text."""


class Redactor:
    """Call with each batch in order."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def __call__(self, batch: ev.StepBatch) -> ev.StepBatch:
        """The batch without its private fields."""
        rules = self._rules
        events = [rules[type(e)](self, e) if type(e) in rules else e for e in batch.events]
        return replace(batch, events=events)

    def _hash(self, h: str) -> str:
        return hashlib.blake2b(bytes.fromhex(h), digest_size=16, key=self._key).hexdigest()

    def _hashes(self, hashes: list[str]) -> list[str]:
        return [self._hash(h) for h in hashes]

    def _salt(self, salt: str | None) -> str | None:
        return None if salt is None else self._hash(salt)

    def _started(self, e: ev.EngineStarted) -> ev.EngineStarted:
        return replace(e, hash_seed=None, capabilities=[c for c in e.capabilities if c != "text"])

    def _queued(self, e: ev.RequestQueued) -> ev.RequestQueued:
        # The spans give the length of the prompt. If there are none, one span is added for it.
        spans = [(start, end, role, "") for start, end, role, _ in e.spans]
        if not spans and e.prompt_token_ids:
            spans = [(0, len(e.prompt_token_ids), "user", "")]
        params = {k: v for k, v in e.params.items() if k not in _WORDS}
        return replace(e, prompt_token_ids=[], salt=self._salt(e.salt), spans=spans, params=params)

    def _stored(self, e: ev.BlocksStored) -> ev.BlocksStored:
        return replace(
            e,
            hashes=self._hashes(e.hashes),
            parent=self._hash(e.parent),
            token_ids=[],
            salt=self._salt(e.salt),
        )

    def _keyed(self, e: Any) -> Any:
        return replace(e, hashes=self._hashes(e.hashes))

    def _sampled(self, e: ev.TokensSampled) -> ev.TokensSampled:
        return replace(e, token_ids=[], text=[""] * len(e.text))

    def _logprobs(self, e: ev.TokenLogprobs) -> ev.TokenLogprobs:
        none: list[int] = []
        return replace(e, seq_ids=none, token_ids=none, logprobs=[], top_ids=[], top_logprobs=[])

    def _pieces(self, e: ev.TokenPieces) -> ev.TokenPieces:
        return replace(e, ids=[], bytes=[])

    def _finished(self, e: ev.RequestFinished) -> ev.RequestFinished:
        return replace(e, error=None if e.error is None else "redacted")

    def _error(self, e: ev.EngineError) -> ev.EngineError:
        return replace(e, message="redacted")

    _rules: ClassVar[dict[type, Callable[[Redactor, Any], Any]]] = {
        ev.EngineStarted: _started,
        ev.RequestQueued: _queued,
        ev.BlocksStored: _stored,
        ev.BlocksEvicted: _keyed,
        ev.PoolSnapshot: _keyed,
        ev.PrefixLookup: _keyed,
        ev.TokensSampled: _sampled,
        ev.TokenLogprobs: _logprobs,
        ev.TokenPieces: _pieces,
        ev.RequestFinished: _finished,
        ev.EngineError: _error,
    }
