"""cache-hit: two users of one assistant. The second reads what the first has computed.

The worked example of prefix caching: a system prompt of 2,000 tokens is 125 blocks of 16. The first
request (200 tokens more) computes 138 blocks, the second, with another 200, reads 125 and computes 13.
A salt goes into the hash of block 0, so each round with a fresh salt begins cold in a warm process.
"""

from __future__ import annotations

from statistics import median

from kvtop.demo import Demo, Script, Stage, page, runs
from kvtop.state.request_view import RequestView

BLOCK, SYSTEM, USER = 16, 2000, 200
SHARED = SYSTEM // BLOCK
WHOLE = -(-(SYSTEM + USER) // BLOCK)
ROUNDS = 3
HANDBOOK = "\n\n".join((page("page.txt"), page("pages/tides.txt"), page("pages/printing.txt", paragraphs=3)))
QUESTIONS = (
    "What is this text about? " + page("pages/sourdough.txt", paragraphs=3),
    "Sum this up for a child: " + page("pages/antarctic.txt", paragraphs=3),
)


def script(stage: Stage) -> Script:
    warm = stage.warm_up(*QUESTIONS, system=HANDBOOK, system_name="handbook", max_tokens=1)
    yield stage.finished(*warm)
    alice, bob = (Exact(stage.request(r), SYSTEM, USER) for r in warm)
    yield stage.begin()

    yield stage.caption(
        f"Two users, one assistant. Its system prompt has {SYSTEM:,} tokens, exactly {SHARED} blocks of {BLOCK}; "
        f"each user adds {USER} tokens. Will the second one pay for the system prompt again?"
    )
    yield stage.caption(
        f"The engine is warm, its cache empty. The first user asks: nothing can match, so all {WHOLE} blocks "
        "of the prompt are computed, chunk by chunk."
    )
    cold = [alice.submit(stage, salt="round 1")]
    yield stage.finished(cold[0])

    yield stage.caption(
        "The answer is done; its blocks stay, unreferenced but findable. Now the second user: "
        f"{SHARED} hashes match, {WHOLE - SHARED} blocks are left to compute. Watch the sweep."
    )
    hit = [bob.submit(stage, salt="round 1")]
    yield stage.finished(hit[0])

    yield stage.caption("One measurement is none: twice more, each time with a fresh salt.")
    for i in range(2, ROUNDS + 1):
        cold.append(alice.submit(stage, salt=f"round {i}"))
        yield stage.finished(cold[-1])
        hit.append(bob.submit(stage, salt=f"round {i}"))
        yield stage.finished(hit[-1])
    judge(stage, [stage.request(r) for r in cold], [stage.request(r) for r in hit])


class Exact:
    """The prompt of `view` cut to size, right for any tokenizer: `system` tokens up to the end of the system
    message, then `user` tokens, in which the template's pieces count."""

    def __init__(self, view: RequestView, system: int, user: int) -> None:
        self.ids: list[int] = []
        self.spans: list[tuple[int, int, str, str]] = []
        template = sum(end - start for start, end, role, _ in view.spans if role == "template")
        head = view.spans[0][1] if view.spans[0][2] == "template" else 0
        room = {"system": system - head, "user": user - (template - head)}
        for start, end, role, name in view.spans:
            piece = view.prompt_token_ids[start:end][: room.get(role)]
            self.spans.append((len(self.ids), len(self.ids) + len(piece), role, name))
            self.ids += piece
        if len(self.ids) != system + user:
            raise ValueError("this model's tokenizer or template makes too few tokens of the demo's text")

    def submit(self, stage: Stage, salt: str) -> int:
        """Send it; eight tokens of answer keep it within the blocks of its prompt."""
        return stage.submit(self.ids, spans=self.spans, max_tokens=8, salt=salt)


def judge(stage: Stage, cold: list[RequestView], hit: list[RequestView]) -> None:
    """Everything that is claimed, as the events told it."""
    first, second = cold[0], hit[0]
    stage.check("first user: prompt tokens", SYSTEM + USER, first.prompt_tokens)
    stage.check("first user: blocks hit", 0, first.hit_blocks)
    stage.check("first user: blocks computed", WHOLE, computed_blocks(first))
    stage.check("second user: blocks hit", SHARED, second.hit_blocks)
    stage.check("second user: tokens read", SYSTEM, second.cached_tokens)
    stage.check("second user: blocks computed", WHOLE - SHARED, computed_blocks(second))
    stage.check("the same physical blocks", runs(first.last_table[:SHARED]), runs(second.hit_ids))
    stage.check("blocks hit in every round", [SHARED] * ROUNDS, [view.hit_blocks for view in hit])
    cold_ms, hit_ms = ([round(1e3 * (view.ttft or 0), 1) for view in views] for views in (cold, hit))
    slow, fast = median(cold_ms), median(hit_ms)
    stage.check("first word sooner", "hit < cold", f"{fast} ms < {slow} ms", ok=0 < fast < slow)
    stage.figure(ttft_cold_ms=cold_ms, ttft_hit_ms=hit_ms, speedup=round(slow / max(fast, 1e-3), 1))


def computed_blocks(view: RequestView) -> int:
    """Blocks of the prompt in which at least one token was computed."""
    usage = view.usage
    return 0 if usage is None else -(-usage.computed_tokens // BLOCK)


DEMO = Demo(
    name="cache-hit",
    title="two users, one system prompt of 2,000 tokens: the second reads 125 blocks and computes 13",
    script=script,
    settings={"block_size": BLOCK, "num_blocks": 546, "enable_prefix_caching": True},
)
