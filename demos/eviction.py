"""eviction: three conversations and a pool that holds two. Who loses what, and in which order?

A block that nobody references stays cached until its memory is taken, least recently used first. A
finished request gives its blocks back last one first, so a chain loses its tail before its head: what
is left can still be found from the front. Each check foretells from the sizes and compares with events.
"""

from __future__ import annotations

from kvtop.demo import Demo, Script, Stage, page, runs
from kvtop.state.request_view import RequestView

TOPICS = ("tides", "printing", "sourdough")
ANSWER = 16


def script(stage: Stage) -> Script:
    usable = stage.state.num_blocks - 1
    yield stage.caption(
        f"A small pool: {usable} usable blocks, room for two of the three conversations that are coming. Who "
        "will lose what, and in which order?"
    )
    talks = [
        stage.engine.new_conversation(page(f"pages/{topic}.txt", paragraphs=3), f"{topic}.txt")
        for topic in TOPICS
    ]
    asked: list[int] = []

    def ask(talk: int, text: str) -> int:
        asked.append(stage.submit(text, conversation=talks[talk], max_tokens=ANSWER))
        return asked[-1]

    yield stage.finished(ask(0, "What is this page about?"))
    yield stage.caption(
        f"Conversation A ({TOPICS[0]}) has its answer. Nobody refers to its blocks any more, and still they stay "
        "cached: memory that nobody wants is best used to remember."
    )
    yield stage.finished(ask(1, "What is this page about?"))
    cached = stage.state.pool.cached
    yield stage.caption(
        f"B ({TOPICS[1]}) took what was free: {cached} blocks are cached. C ({TOPICS[2]}) will not fit. Least recently "
        "used are A's blocks, and of a chain the last one goes first. Watch the ×."
    )
    yield stage.finished(ask(2, "What is this page about?"))
    lost = len(stage.request(asked[2]).evicted_ids)
    yield stage.caption(
        f"A has lost {lost} blocks, from its end. Had its head gone first, the rest would be out of reach: a "
        "look-up stops at the first miss. Now A asks again, and reads what is left."
    )
    yield stage.finished(ask(0, "And what comes first?"))
    judge(stage, cached, *(stage.request(r) for r in asked))


def judge(
    stage: Stage, cached: int, a: RequestView, b: RequestView, c: RequestView, again: RequestView
) -> None:
    """Foretell every count from the sizes of the conversations, then compare with what happened."""
    size, usable = stage.state.block_size, stage.state.num_blocks - 1

    def touched(view: RequestView) -> int:
        """Blocks that a request needs: its last sampled token never has KV."""
        return -(-(view.prompt_tokens + view.num_output - 1) // size)

    def full(view: RequestView) -> int:
        """Of these the full ones, which stay cached; a partial block is never hashed."""
        return (view.prompt_tokens + view.num_output - 1) // size

    needs = touched(a) + touched(b) + touched(c)
    stage.check("three conversations do not fit", f"over {usable}", needs, ok=needs > usable)
    stage.check("cached after A and B", full(a) + full(b), cached)

    lost = touched(c) - (usable - cached)
    left = full(a) - lost
    stage.check("blocks evicted for C", lost, len(c.evicted_ids))
    stage.check("C evicts A's chain, tail first", backwards(full(a), lost), places(a, c.evicted_ids))
    stage.check("A again: blocks hit", left, again.hit_blocks)
    stage.check("A again: tokens read", left * size, again.cached_tokens)
    stage.check("A again: its own first blocks", runs(a.last_table[:left]), runs(again.hit_ids))

    free = usable - full(b) - full(c) - left
    taken = max(0, touched(again) - left - free)
    stage.check(
        "A again evicts B's chain, tail first", backwards(full(b), taken), places(b, again.evicted_ids)
    )
    stage.figure(
        usable_blocks=usable,
        needed_blocks=[touched(v) for v in (a, b, c)],
        evicted_blocks=len(c.evicted_ids) + len(again.evicted_ids),
        blocks_left=left,
    )


def backwards(length: int, count: int) -> str:
    """Places of the last `count` blocks of a chain, last first."""
    return runs(range(length - 1, length - 1 - count, -1))


def places(view: RequestView, ids: list[int]) -> str:
    """Where in a request's block table these physical blocks stood; -1 for a block of somebody else."""
    table = view.last_table
    return runs([table.index(i) if i in table else -1 for i in ids])


DEMO = Demo(
    name="eviction",
    title="three conversations in a pool for two: the tail of the oldest chain goes first",
    script=script,
    settings={"block_size": 16, "num_blocks": 73, "enable_prefix_caching": True},
)
