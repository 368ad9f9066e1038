"""SamplingParams: what a request may ask of the sampler and of stopping, validated once.

Owns the fields, their ranges and their messages; None means "the model's own default" and is
resolved by `resolved()` against the model's generation_config before a request is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any

from engine.step.beam import EarlyStopping

MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request. Raises ValueError with one line that names the field."""

    max_tokens: int = 256
    """Most tokens to generate, at least 1; of each sample."""
    n: int = 1
    """Samples of one prompt, which hold its blocks once; sample b draws as branch b of the seed."""
    beam_width: int = 1
    """Over 1: beam search with so many beams; the best hypothesis is the answer, nothing is drawn."""
    length_penalty: float = 1.0
    """Of beam search: a hypothesis scores its log probability / its length to this power, -10 to 10."""
    early_stopping: EarlyStopping = "no"
    """Of beam search: `yes` with beam_width hypotheses, `no` when the best beam cannot beat them as long as it
    is, `never` when it cannot at any length."""
    temperature: float | None = None
    """0 is greedy; None takes the model's default, else greedy, or 0.7 where n is over 1."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float | None = None
    """Keep the smallest set whose probability reaches p, 0 < p <= 1."""
    min_p: float | None = None
    """Drop tokens less likely than min_p times the most likely one, 0 <= min_p < 1."""
    seed: int | None = None
    """None derives one from the engine's seed and the request's number."""
    stop: tuple[str, ...] = ()
    """Texts that end the output; not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, beside the model's EOS ids."""
    ignore_eos: bool = False
    """Go on after an EOS token (for measurements)."""
    min_tokens: int = 0
    """Neither EOS nor a stop token is drawn, no stop text ends the output, before so many tokens."""
    repetition_penalty: float | None = None
    """Divides (or, under 0, multiplies) the logit of every token of prompt and output; over 0, at most 10."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token in the output, -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that it stands in the output, -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit, -100 to 100); a mapping is taken too."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not come up, with or without a space before them; at most 100."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """The same as token ids; what `bad_words` says is added here once a tokenizer is at hand."""
    logprobs: int | None = None
    """Tell the log probability of each token and of the k likeliest in its place, 0 to 20; None tells none.
    They are the model's own, before bias, penalties and filters."""

    def __post_init__(self) -> None:
        def need(ok: bool, text: str) -> None:
            if not ok:
                raise ValueError(text)

        need(self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}")
        need(1 <= self.n <= 1024, f"n must be between 1 and 1024, not {self.n}")
        t, k, p = self.temperature, self.top_k, self.top_p
        need(t is None or 0 <= t <= 100, f"temperature must be between 0 and 100, not {t}")
        need(k is None or k >= 0, f"top_k must be 0 (all) or more, not {k}")
        need(p is None or 0 < p <= 1, f"top_p must be over 0 and at most 1, not {p}")
        m = self.min_p
        need(m is None or 0 <= m < 1, f"min_p must be at least 0 and under 1, not {m}")
        need(not isinstance(self.stop, str), f"stop must be a tuple of texts, not the text {self.stop!r:.40}")
        need(all(self.stop), "stop must not contain an empty text")
        ids = self.stop_token_ids
        need(all(i >= 0 for i in ids), f"stop_token_ids must be 0 or more, not {min(ids, default=0)}")
        n = self.min_tokens
        need(
            0 <= n <= self.max_tokens, f"min_tokens must be from 0 to max_tokens ({self.max_tokens}), not {n}"
        )
        r = self.repetition_penalty
        need(r is None or 0 < r <= 10, f"repetition_penalty must be over 0 and at most 10, not {r}")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            need(-2 <= penalty <= 2, f"{name} must be between -2 and 2, not {penalty}")
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        object.__setattr__(self, "logit_bias", tuple(sorted((int(i), float(b)) for i, b in pairs)))
        for i, bias in self.logit_bias:
            need(i >= 0, f"logit_bias must name token ids from 0 on, not {i}")
            need(
                isfinite(bias) and -100 <= bias <= 100, f"logit_bias must be between -100 and 100, not {bias}"
            )
        given = [i for i, _ in self.logit_bias]
        need(len(set(given)) == len(given), "logit_bias must name a token once")
        words = self.bad_words
        need(not isinstance(words, str), f"bad_words must be a tuple of texts, not the text {words!r:.40}")
        need(all(w.strip() for w in words), "bad_words must not contain an empty text")
        need(len(words) <= 100, f"bad_words must be at most 100, not {len(words)}")
        need(all(self.bad_word_ids), "bad_word_ids must not contain an empty word")
        need(all(i >= 0 for w in self.bad_word_ids for i in w), "bad_word_ids must be 0 or more")
        k = self.logprobs
        need(k is None or 0 <= k <= MOST_LOGPROBS, f"logprobs must be from 0 to {MOST_LOGPROBS}, not {k}")
        w = self.beam_width
        need(1 <= w <= 256, f"beam_width must be between 1 and 256, not {w}")
        need(
            -10 <= self.length_penalty <= 10,
            f"length_penalty must be from -10 to 10, not {self.length_penalty}",
        )
        e = self.early_stopping
        need(e in ("no", "yes", "never"), f"early_stopping must be no, yes or never, not {e!r:.40}")
        if w > 1:
            plain = self.n == 1 and not self.stop and self.logprobs is None
            shaped = self.shapes_logits or bool(self.bad_words)
            need(
                plain and not shaped,
                "beam_width over 1 goes with neither n, stop texts, penalties nor logprobs",
            )
        s = self.seed
        need(s is None or 0 <= s < 2**63, f"seed must be between 0 and 2**63 - 1, not {s}")

    def resolved(self, defaults: dict[str, Any], seed: int) -> SamplingParams:
        """Copy without None: `defaults` is the model's generation_config (do_sample, temperature, top_k, top_p,
        min_p, repetition_penalty), `seed` is used where none was given.

        As in transformers the filters need do_sample, the penalty does not. A beam takes no penalty."""
        defaults = {
            key: value for key, value in defaults.items() if value is not None
        }  # some configs say null
        own = defaults if defaults.get("do_sample", False) else {}
        penalty = self.repetition_penalty
        if penalty is None:
            penalty = 1.0 if self.beam_width > 1 else defaults.get("repetition_penalty", 1.0)
        t = self.temperature if self.temperature is not None else own.get("temperature")
        if t is None:
            t = 1.0 if own else 0.7 if self.n > 1 else 0.0  # n greedy samples would be n times the same
        return replace(
            self,
            temperature=float(t),
            top_k=int(self.top_k if self.top_k is not None else own.get("top_k", 0)),
            top_p=float(self.top_p if self.top_p is not None else own.get("top_p", 1.0)),
            min_p=float(self.min_p if self.min_p is not None else own.get("min_p", 0.0)),
            repetition_penalty=float(penalty),
            seed=self.seed if self.seed is not None else seed,
        )

    @property
    def counts_tokens(self) -> bool:
        """A penalty asks which tokens came up before."""
        return self.repetition_penalty not in (None, 1) or bool(
            self.presence_penalty or self.frequency_penalty
        )

    @property
    def needs_each_token(self) -> bool:
        """The host must have seen a token before the next one can be drawn."""
        return self.beam_width > 1 or self.logprobs is not None or self.shapes_logits

    @property
    def shapes_logits(self) -> bool:
        """The logits are changed before a token is drawn, by what was drawn before or by a fixed bias."""
        return self.counts_tokens or bool(self.logit_bias or self.bad_word_ids or self.min_tokens)

    @property
    def token_ids(self) -> list[int]:
        """Every token id that it names."""
        return [
            *self.stop_token_ids,
            *(i for i, _ in self.logit_bias),
            *(i for w in self.bad_word_ids for i in w),
        ]

    def with_words(self, encode: Callable[[str], Sequence[int]]) -> SamplingParams:
        """Copy whose bad_word_ids also hold what `encode` makes of bad_words, at the start of a text and after
        a space."""
        forms = [form for w in self.bad_words for form in (w, f" {w.lstrip()}")]
        ids = dict.fromkeys((*self.bad_word_ids, *(tuple(encode(form)) for form in forms)))
        return replace(self, bad_word_ids=tuple(word for word in ids if word))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for RequestQueued.params."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value
