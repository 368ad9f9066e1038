"""SamplingParams: what a request may ask of the sampler and of stopping, validated once.

Owns the fields, their ranges and their messages; None means "the model's own default" and is
resolved by `resolved()` against the model's generation_config before a request is queued.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling and stopping of one request. Raises ValueError with one line that names the field."""

    max_tokens: int = 256
    """Most tokens to generate, at least 1; of each sample."""
    n: int = 1
    """Samples of one prompt, which hold its blocks once; sample b draws as branch b of the seed."""
    temperature: float | None = None
    """0 is greedy; None takes the model's default, else greedy."""
    top_k: int | None = None
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float | None = None
    """Keep the smallest set whose probability reaches p, 0 < p <= 1."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one, 0 <= min_p < 1."""
    seed: int | None = None
    """None derives one from the engine's seed and the request's number."""
    stop: tuple[str, ...] = ()
    """Texts that end the output; not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, beside the model's EOS ids."""
    ignore_eos: bool = False
    """Go on after an EOS token (for measurements)."""

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
        need(0 <= self.min_p < 1, f"min_p must be at least 0 and under 1, not {self.min_p}")
        need(not isinstance(self.stop, str), f"stop must be a tuple of texts, not the text {self.stop!r:.40}")
        need(all(self.stop), "stop must not contain an empty text")
        s = self.seed
        need(s is None or 0 <= s < 2**63, f"seed must be between 0 and 2**63 - 1, not {s}")

    def resolved(self, defaults: dict[str, Any], seed: int) -> SamplingParams:
        """Copy without None: `defaults` is the model's generation_config (temperature, top_k, top_p,
        do_sample), `seed` is used where none was given."""
        own = defaults if defaults.get("do_sample", False) else {}
        t = self.temperature if self.temperature is not None else own.get("temperature")
        if t is None:  # some configs say null
            t = 1.0 if own or self.n > 1 else 0.0  # n greedy samples would be n times the same
        return replace(
            self,
            temperature=float(t),
            top_k=int(self.top_k if self.top_k is not None else own.get("top_k") or 0),
            top_p=float(self.top_p if self.top_p is not None else own.get("top_p") or 1.0),
            seed=self.seed if self.seed is not None else seed,
        )

    @property
    def is_greedy(self) -> bool:
        """True if every step takes the most likely token (call on resolved params)."""
        return not self.temperature or self.top_k == 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values for RequestQueued.params."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in out.items()}
