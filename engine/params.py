"""SamplingParams: what a request may ask of the sampler and of stopping, checked once.

Owns the knobs of sampling: their defaults, ranges and help. The command line, the lines of --prompts, the config file
and docs/options.md are made from these fields. None means "the model's own default"; `resolved` takes it from the
model's generation_config before a request is queued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from engine.knobs import Knob, KnobError, check_fields

EarlyStopping = Literal["no", "yes", "never"]

MOST_LOGPROBS = 20

LEAST_TEMPERATURE = 1e-6
"""Below it a request is greedy: logits divided by less are not finite any more."""

_JSONL = ()
"""Commands of a knob that a line of --prompts or Python may set, but no option."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request. Raises ValueError with one line that names the field.

    Each list is stored as a tuple. `logit_bias` may be a mapping. None of temperature, top_k, top_p, min_p and
    repetition_penalty means the model's own default; see `resolved`.
    """

    # fmt: off
    max_tokens: Annotated[int, Knob("Most tokens to generate, in each sample.", "sampling", ge=1, le=2**31 - 1, says="at least 1, and under 2**31")] = 256
    n: Annotated[int, Knob("Samples of each prompt, which share its blocks.", "sampling", ge=1, le=1024)] = 1
    beam_width: Annotated[int, Knob("Beams; over 1 the answer is the best hypothesis of a beam search.", "sampling", ge=1, le=256, short=("--beam",))] = 1
    length_penalty: Annotated[float, Knob("Of beam search: over 1 favours long answers, under 1 short ones.", "sampling", ge=-10, le=10)] = 1.0
    early_stopping: Annotated[EarlyStopping, Knob("When a beam search ends. yes: with the first complete hypotheses. no, never: when no hypothesis can get better.", "sampling")] = "no"
    temperature: Annotated[float | None, Knob("0 is greedy. Default: the model's own.", "sampling", ge=0, le=100)] = None
    top_k: Annotated[int | None, Knob("Keep the k most likely tokens; 0 keeps all. Default: the model's own.", "sampling", ge=0, le=2**63 - 1, says="0 (all) or more, and under 2**63")] = None
    top_p: Annotated[float | None, Knob("Keep the smallest set of tokens whose probability reaches p. Default: the model's own.", "sampling", gt=0, le=1)] = None
    min_p: Annotated[float | None, Knob("Drop tokens less likely than this part of the most likely one. Default: the model's own.", "sampling", ge=0, lt=1)] = None
    seed: Annotated[int | None, Knob("Seed of this request. Default: made from the engine's seed and the request's number.", "sampling", _JSONL, ge=0, le=2**63 - 1)] = None
    stop: Annotated[tuple[str, ...], Knob("Text that ends an answer and is no part of it; may be given several times.", "sampling", metavar="TEXT", example="END")] = ()
    stop_token_ids: Annotated[tuple[int, ...], Knob("Token id that ends an answer, besides the model's own; may be given several times.", "sampling", ge=0, le=2**31 - 1, says="0 or more, and under 2**31", example=2)] = ()
    ignore_eos: Annotated[bool, Knob("Go on after an end token (for measurements).", "sampling")] = False
    min_tokens: Annotated[int, Knob("An answer has at least this many tokens.", "sampling", ge=0, le=2**31 - 1, says="0 or more")] = 0
    repetition_penalty: Annotated[float | None, Knob("Over 1: tokens of the prompt and the answer become less likely. Default: the model's own.", "sampling", gt=0, le=10)] = None
    presence_penalty: Annotated[float, Knob("Taken off the logit of each token that is in the answer.", "sampling", ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Knob("Taken off the logit of a token for each time that it is in the answer.", "sampling", ge=-2, le=2)] = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], Knob("Token ids, and what is added to the logit of each, from -100 to 100.", "sampling", _JSONL, says="a list of pairs of a token id and a number")] = ()
    bad_words: Annotated[tuple[str, ...], Knob("Text that must not appear in the answer, with or without a space before it; may be given several times.", "sampling", metavar="TEXT", most=100, example="sorry")] = ()
    bad_word_ids: Annotated[tuple[tuple[int, ...], ...], Knob("The same as lists of token ids.", "sampling", _JSONL, says="a list of lists of token ids")] = ()
    logprobs: Annotated[int | None, Knob("With --json: the log probability of each token, and of the k most likely ones. The model's own, before bias, penalties and filters.", "sampling", ge=0, le=MOST_LOGPROBS)] = None
    # fmt: on

    def __post_init__(self) -> None:
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        check_fields(self)
        _need("" not in self.stop, "{} must not contain an empty text", "stop")
        n = self.min_tokens
        if n > self.max_tokens:
            raise KnobError(
                f"{{}} must be from 0 to {{}} ({self.max_tokens}), not {n}", "min_tokens", "max_tokens"
            )
        object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias)))
        for i, bias in self.logit_bias:
            _need(0 <= i < 2**31, f"{{}} must name token ids from 0 to under 2**31, not {i}", "logit_bias")
            _need(-100 <= bias <= 100, f"{{}} must be between -100 and 100, not {bias}", "logit_bias")
        given = {i for i, _ in self.logit_bias}
        _need(len(given) == len(self.logit_bias), "{} must name a token once", "logit_bias")
        _need(all(w.strip() for w in self.bad_words), "{} must not contain an empty text", "bad_words")
        _need(all(self.bad_word_ids), "{} must not contain an empty word", "bad_word_ids")
        ids = [i for word in self.bad_word_ids for i in word]
        _need(all(0 <= i < 2**31 for i in ids), "{} must be 0 or more, and under 2**31", "bad_word_ids")
        if self.beam_width > 1:
            plain = self.n == 1 and not self.stop and self.logprobs is None
            shaped = self.shapes_logits or bool(self.bad_words)
            _need(
                plain and not shaped,
                "{} over 1 goes with neither n, stop texts, penalties nor logprobs",
                "beam_width",
            )

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
            temperature=float(t) if t >= LEAST_TEMPERATURE else 0.0,
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


def _need(ok: bool, template: str, *knobs: str) -> None:
    if not ok:
        raise KnobError(template, *knobs)


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value
