"""What the figures outside the panels mean: header, chat, map, look-up strip, step line, block.

Panels have their own definitions. These widgets have many figures and little room, so theirs are
here, by widget. Invariant: every figure that the default view shows is defined once, with its unit.
"""

from __future__ import annotations

from textual.widget import Widget

from kvtop.state.series import LATEST
from kvtop.widgets.bars.header import Header
from kvtop.widgets.bars.hint import Hint
from kvtop.widgets.bars.step_line import StepLine
from kvtop.widgets.chat.chat import Chat
from kvtop.widgets.chat.lookup_strip import LookupStrip
from kvtop.widgets.map.block_detail import BlockDetail
from kvtop.widgets.map.block_map import BlockMap

Definition = tuple[str, str]

FIGURES: dict[type[Widget], tuple[str, tuple[Definition, ...]]] = {
    Header: (
        "top line",
        (
            ("blocks", "Physical blocks of the pool that can be used: all but the null block."),
            ("running", "Requests that were admitted and are not finished."),
            ("waiting", "Requests that were never admitted, and turns that wait for the answer before."),
            (
                "preempted",
                "Requests that gave their blocks up and wait to start over; not among the waiting.",
            ),
            ("hit", "Tokens read from the cache / prompt tokens, over first admissions; percent, floored."),
            ("tok/s", "Output tokens per second, all sequences together, over the last 2 s."),
            ("LIVE, REPLAY", "Where the batches come from. SLOW: the engine waits between steps (F3)."),
            (
                "SIMULATED",
                "No model computes: text is made up, times follow a cost model (×: faster than time).",
            ),
            ("REC", "A recording is being written. REC FAILED: it ended early; the log (F4) has the reason."),
            ("LOST", "Batches that did not reach the screen; the next snapshot sets it right."),
        ),
    ),
    Chat: (
        "chat",
        (
            ("read", "Prompt tokens whose keys and values came from the prefix cache."),
            ("computed", "Prompt tokens that had to be computed. read + computed = the prompt."),
            ("ms", "Time from the request's arrival to its first token."),
            (
                "17×",
                "How many times sooner than the cold request that the lookup names. Compared only where the tokens "
                "read are at least half of both prompts, neither was preempted or in slow motion, and no other request "
                "was running when the cold one arrived.",
            ),
            ("▌", "This stretch of the prompt was read from the cache."),
            (
                "kept as text",
                "The prompt has the name of a special token, like <|im_end|>, which is marked. It was encoded as plain "
                "text and ends no turn. With --allow-special-tokens it acts as that token.",
            ),
        ),
    ),
    BlockMap: (
        "KV pool",
        (
            (
                "cell",
                "One physical block while all fit; else the title says how many blocks a cell stands for.",
            ),
            ("majority", "With several blocks a pixel it shows the state that most of them have."),
            (
                "active, shared, filling",
                "Blocks that sequences refer to: by one and full, by two or more, by one and not full. Together they "
                "are the blocks referenced. A request holds many blocks, and several may share one: no count here "
                "equals the running requests.",
            ),
            (
                "cached, free",
                "Blocks that nobody refers to: with a content that can still be hit, and without.",
            ),
            (
                "hit ◆",
                "An active block that a request read from the cache; other hit blocks keep their glyph.",
            ),
            (
                "evicted ×",
                "The content was just thrown out and nothing is written yet; then the new glyph glows.",
            ),
            ("refs", "Sequences whose block table names the block."),
            ("read", "Look-ups that read the block's present content."),
        ),
    ),
    LookupStrip: (
        "lookup",
        (
            ("cell", "One block of the prompt, first to last; ◆ was read, the others were computed."),
            ("╎", "Where the look-up stopped: the first block that was not found."),
            ("READ n of m", "Tokens read from the cache, of the prompt's tokens."),
            (
                "first word",
                "Time from the request's arrival to its first token; cold: of the latest earlier request over "
                "the same beginning that read nothing, where the two can be compared (see chat, 17×).",
            ),
            ("physical", "Blocks of the pool that were read, in the prompt's order."),
            ("first miss", "Why the look-up stopped there."),
        ),
    ),
    StepLine: (
        "step",
        (
            ("decode", "Tokens of the last step that went to requests which already generate, one each."),
            ("prefill", "Prompt tokens that the last step computed."),
            (
                "unused … of",
                "What was left of the step's token budget, and the budget: --max-num-batched-tokens, less where a long "
                "context would make the step too slow.",
            ),
            (
                "ITL",
                f"Time from one token of a sequence to its next; p50: half of the latest {LATEST:,} took at most this "
                "long, steps in slow motion left out.",
            ),
            ("next out", "Blocks that are handed out next; a cached one loses its content then."),
        ),
    ),
    BlockDetail: (
        "block",
        (
            ("refs", "Sequences whose block table names it, with its place in each."),
            ("slots", "Tokens whose keys and values are written, of the block's size."),
            ("hash", "First 8 hex digits; parent: the hash of the block before it."),
            ("age", "Time since its present content began."),
            ("out", "How many free blocks are handed out before it; a referenced one cannot be taken."),
        ),
    ),
    Hint: (
        "below the prompt",
        (
            (
                "first eviction in",
                "Blocks that can be handed out before a cached one loses its content.",
            ),
            (
                "evicted so far",
                "Cached blocks that have lost their content to other content since the start.",
            ),
        ),
    ),
}
"""Title and definitions by widget."""
