"""The event schema: THE contract between whoever makes KV blocks move and whoever shows it.

Owns the types, their JSON form and nothing else; imports no torch. Two laws hold for every stream:
replaying the seven pool events rebuilds ref counts, hashes, tables and the exact free-queue order at
every step; and `seq` and `first_event` are contiguous, so that a missing batch or event is visible.
New types and new fields with a default, which a reader may skip, keep `SCHEMA`; a field that is removed,
renamed or means something else bumps it. Either is told in CHANGELOG.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec

SCHEMA = 1
"""Major version of the contract. Readers refuse a newer one and skip unknown event types."""

NULL_BLOCK = 0
"""Physical block that is never handed out; the pool's queue starts as 1..num_blocks-1."""

# What a number in a stream may be. Reading refuses any other; making an event checks nothing and costs nothing.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A number of things, an index, or an id."""
Block = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
"""A physical block; the null block is in no event."""
Work = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""Bytes or floating-point operations of one step."""
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
"""A whole number that may be negative."""
Token = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
"""A token id; hashes cover it as an int32."""
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""An instant; one before the stream began is negative."""
Number = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""A finite figure that may be negative."""
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""Seconds that something took."""
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
"""A measured quantity, such as bytes/s."""
Hash = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
"""32 hex digits."""

_Bytes = bytes
"""The contract names a field `bytes`, which would hide the type inside its class."""


class Event(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag=True):
    """Base of all events. In JSON `type` (the class name) comes first."""


# ------------------------------------------------------------------ pool: only these seven change it


class BlocksAllocated(Event, frozen=True):
    """Popped from the queue's head in this order; ref = 1; appended to the sequence's table."""

    seq_id: Count
    ids: list[Block]


class BlocksTouched(Event, frozen=True):
    """Left the queue if ref was 0; ref + 1; appended to the sequence's table."""

    seq_id: Count
    ids: list[Block]
    why: Literal["hit", "fork"]


class BlocksCopied(Event, frozen=True):
    """Copy-on-write: dst popped from the head (without BlocksAllocated), ref[dst] = 1,
    table[index] = dst, ref[src] - 1 (src stays referenced by another table)."""

    seq_id: Count
    index: Count
    src: Block
    dst: Block


class BlocksReleased(Event, frozen=True):
    """The table's last len(ids) entries, last first; ref - 1 each. Of those now at 0 the unhashed go
    to the queue's head as one group in this order, the hashed to its tail in this order."""

    seq_id: Count
    ids: list[Block]


class BlocksStored(Event, frozen=True):
    """Full blocks enter the hash table.

    `parent` is the hash before the first of them (the root's for start_index 0), `token_ids` the
    len(ids) * block_size tokens, `salt` the digest that block 0's hash covers (None without salt).
    Hashes are 32 hex digits.
    """

    seq_id: Count
    start_index: Count
    ids: list[Block]
    hashes: list[Hash]
    parent: Hash
    token_ids: list[Token]
    salt: Hash | None = None


class BlocksEvicted(Event, frozen=True):
    """Drops the hashes of these blocks and moves nothing.

    reallocated: taken for new content by `by_seq` (precedes its Allocated or Copied);
    unwritten: published for a forward that did not run; invalid: KV found bad (NaN logits).
    """

    ids: list[Block]
    hashes: list[Hash]
    by_seq: Count | None
    why: Literal["reallocated", "unwritten", "invalid"]


class CacheCleared(Event, frozen=True):
    """Drops all hashes; the queue's order is unchanged."""


class PoolSnapshot(Event, frozen=True):
    """The pool's own word, made by the pool between two steps; last event of its own batch.

    refs: triples [first, count, ref, ...] over the blocks with ref > 0, ascending.
    queue: pairs [first, count, ...] head first; a negative count runs downwards (5, -3 = 5, 4, 3).
    hashed_ids / hashes: every block that carries a hash, ascending by id.
    seq_ids / tables / computed: live sequences, their block tables and num_computed tokens.
    """

    refs: list[Count]
    queue: list[Whole]
    hashed_ids: list[Block]
    hashes: list[Hash]
    seq_ids: list[Count]
    tables: list[list[Block]]
    computed: list[Count]


# ------------------------------------------------------------------------------------ engine life


class ModelLoading(Event, frozen=True):
    """Progress of a start; `done` and `total` in the unit that `what` implies (bytes for files)."""

    done: Count
    total: Count
    what: str


Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Bytes, or a seed."""


class Knobs(msgspec.Struct, frozen=True, gc=False):
    """How the engine is set: the fields of EngineConfig that EngineStarted has not itself, and what the start decided
    beyond them. Defaults are those of an engine that was not told otherwise; a reader ignores keys it does not know."""

    revision: str | None = None
    quantization: str | None = None
    ops: str = "auto"
    """The kernels that were chosen."""
    attention_backend: str = "auto"
    threads: Count | None = None
    allow_special_tokens: bool = False
    kv_cache_memory: Size | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: Number = 0.9
    enable_prefix_caching: bool = True
    audit: Count = 0
    max_num_batched_tokens: Count | None = None
    max_num_seqs: Count = 64
    speculate: Count = 0
    async_scheduling: bool | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: Count = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduling_policy: str = "fcfs"
    watermark: Number = 0.0
    max_num_queued_requests: Count | None = None
    max_num_queued_tokens: Count | None = None
    seed: Size = 0
    # ---- decided by the start
    kv_cache: str | None = None
    """How the KV memory adds up, in words."""
    notice: str | None = None
    """What a user should know about this model here."""
    special_tokens: list[str] = []
    """Their names, as a text would spell them."""
    machine: str | None = None
    """What is simulated."""
    weights: str | None = None
    """Format of the simulated weights."""
    speed: Duration | None = None
    """Simulated seconds a second; None: as fast as possible, or not simulated."""


class EngineStarted(Event, frozen=True):
    """First event of a run but for ModelLoading. Pool events come only after it."""

    schema: Count
    source: Literal["live", "simulated", "recorded", "remote"]
    capabilities: list[str]
    """What this source can know: blocks, text, timings, device. Panels say so where it can't."""
    model: str
    device: str
    dtype: str
    num_blocks: Count
    """Physical blocks, the null block included."""
    block_size: Count
    bytes_per_block: Count
    weights_bytes: Count
    hash_seed: int | None
    """None in a redacted recording: hashes then cannot be recomputed."""
    epoch: Seconds
    """Unix time at t = 0 of the batches."""
    max_model_len: Count
    knobs: Knobs
    """Every other setting of the engine."""


class EngineStopped(Event, frozen=True):
    """Last event of a complete stream."""

    reason: str = "stopped"


class EngineError(Event, frozen=True):
    """Something failed. fatal: the engine stops; otherwise it goes on without `request_id`."""

    message: str
    request_id: Count | None = None
    fatal: bool = False


class HitAudited(Event, frozen=True):
    """What a request read from the cache was computed again (--audit). blocks: those compared; bad: of
    them those whose KV is not what their tokens give (an EngineError and BlocksEvicted invalid follow);
    error: the largest distance found, relative, None where it was not finite; tolerance: what it may be."""

    request_id: Count
    blocks: list[Block]
    bad: list[Block]
    error: Amount | None
    tolerance: Amount


class DeviceSample(Event, frozen=True):
    """None = this device does not tell. util in percent, memory in bytes, power in W, temperature
    in degrees Celsius, bandwidth in bytes/s."""

    util: Amount | None = None
    memory: Count | None = None
    memory_total: Count | None = None
    power: Amount | None = None
    temperature: Number | None = None
    bandwidth: Amount | None = None


class KernelsProfiled(Event, frozen=True):
    """Where the time of one step's forward went: columns, a row for each kernel, all layers together.

    calls: of the operation; seconds: on the device; bytes, flops: the least that these shapes make it read and
    write, and compute. forward: seconds from the first kernel's start to the last one's end, what lies between
    kernels included. bandwidth (bytes/s) and peak (FLOP/s): measured on this device; None: not known.
    """

    tokens: Count
    sequences: Count
    names: list[str]
    calls: list[Count]
    seconds: list[Duration]
    bytes: list[Work]
    flops: list[Work]
    forward: Duration
    bandwidth: Amount | None = None
    peak: Amount | None = None


class GraphCaptured(Event, frozen=True):
    """Steps that decode up to `bucket` sequences run as one CUDA graph from now on. graphs: how many there are
    with it, 1 after all were dropped; 0: it could not be captured, and steps run without any. seconds: it took."""

    bucket: Count
    graphs: Count
    seconds: Duration


# --------------------------------------------------------------------------------------- requests


class Timings(msgspec.Struct, frozen=True, gc=False):
    """Instants on the batches' clock, in seconds; None where the request never got there."""

    t_arrival: Seconds
    t_admitted: Seconds | None = None
    t_first_token: Seconds | None = None
    t_last_token: Seconds | None = None
    t_finished: Seconds | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens. cached + computed = prompt at the first admission; cache_write = prompt tokens in
    blocks that this request published; recomputed = computed again after preemptions."""

    prompt_tokens: Count
    cached_tokens: Count
    computed_tokens: Count
    cache_write_tokens: Count
    output_tokens: Count
    preemptions: Count = 0
    recomputed_tokens: Count = 0


class RequestQueued(Event, frozen=True):
    """A request entered the waiting queue. spans: (start, end, role, name) over prompt tokens. position: its index
    in the queue, -1 if it is refused at once or (in older recordings) not known: then at the end."""

    request_id: Count
    prompt_token_ids: list[Token]
    t_arrival: Seconds
    n: Count = 1
    priority: Whole = 0
    salt: Hash | None = None
    conversation: Whole | None = None
    spans: list[tuple[Count, Count, str, str]] = []
    params: dict[str, Any] = {}
    position: Whole = -1


class PrefixLookup(Event, frozen=True):
    """One look into the hash table, once per admission (later look-ups of a running prefill emit
    only BlocksTouched). hashes: every full block of the sequence that could be asked for."""

    request_id: Count
    hashes: list[Hash]
    hit_blocks: Count
    queried_blocks: Count
    hit_tokens: Count
    prompt_tokens: Count
    resumed: bool = False
    template_rewrote_history: bool = False


class AdmissionBlocked(Event, frozen=True):
    """The head of the waiting queue cannot be admitted; emitted on change only.

    reason blocks: it needs `need`, running prompts leave `free` over; watermark: the same, and `free` is
    what an admission may take; max_num_seqs: sequences it needs
    and places that are free; max_num_batched_tokens (without chunked prefill): tokens of both.
    """

    request_id: Count
    need: Count
    free: Count
    reason: str


class RequestAdmitted(Event, frozen=True):
    """From waiting to running. cached_tokens: read from the cache instead of computed."""

    request_id: Count
    seq_id: Count
    cached_tokens: Count
    resumed: bool = False


class RequestPreempted(Event, frozen=True):
    """Back to the waiting queue, to index `position` (-1 in older recordings: to its front); its blocks were
    released (BlocksReleased)."""

    request_id: Count
    seq_ids: list[Count]
    tokens_lost: Count
    """Computed tokens whose KV was given up (part of it may come back as cache hits)."""
    position: Whole = -1


class RequestFinished(Event, frozen=True):
    """reason: stop, length, abort, error, refused; `error` says why for the last two."""

    request_id: Count
    reason: Literal["stop", "length", "abort", "error", "refused"]
    timings: Timings
    usage: Usage
    error: str | None = None


# ------------------------------------------------------------------------------------------ steps


class StepScheduled(Event, frozen=True):
    """Columns, one row per scheduled sequence: tokens [start, start + n) are computed. In the same batch as the
    step's TokensSampled and StepCompleted. A step that was launched while another was in flight is told here
    when that one is finished: what it took from the pool may stand in the batch before, and rows of sequences
    that had ended by then are left out (StepCompleted.overrun)."""

    seq_ids: list[Count]
    start: list[Count]
    n: list[Count]
    drafts: list[Count] = []


class TokensSampled(Event, frozen=True):
    """Columns, one event a step, a row for every scheduled sequence that was executed.

    counts: tokens sampled in that row (0 for a chunk that is not the last); token_ids is flat over
    rows; num_computed after the step; text: what became visible (never half a character).
    """

    seq_ids: list[Count]
    token_ids: list[Token]
    counts: list[Count]
    num_computed: list[Count]
    text: list[str]


class TokenLogprobs(Event, frozen=True):
    """Columns, a row for every token that was just sampled (TokensSampled came before) where its request asks.

    Natural logarithms of the model's own probabilities, before penalties and filters: logprobs of the
    tokens drawn; top_ids and top_logprobs, falling, of the k likeliest in each place.
    """

    seq_ids: list[Count]
    token_ids: list[Token]
    logprobs: list[Number]
    top_ids: list[list[Token]]
    top_logprobs: list[list[Number]]


class TokenPieces(Event, frozen=True):
    """Raw bytes of token ids at their first use in a stream, so that no reader needs a tokenizer."""

    ids: list[Token]
    bytes: list[_Bytes]


class SequenceForked(Event, frozen=True):
    """Emitted before parent and child sample."""

    request_id: Count
    parent: Count
    child: Count


class BeamPruned(Event, frozen=True):
    """A beam was dropped; its blocks follow as BlocksReleased."""

    request_id: Count
    seq_id: Count


class DraftVerified(Event, frozen=True):
    """Speculative tokens proposed and accepted for one sequence in one step."""

    seq_id: Count
    proposed: Count
    accepted: Count


class StepCompleted(Event, frozen=True):
    """Times in seconds; t_gpu None without a GPU. queues: running, waiting, preempted (a part of
    waiting). free, active, cached: usable blocks never hashed and unreferenced / referenced /
    unreferenced but hashed; they add up to num_blocks - 1. slow: slow motion waited in this step,
    or it was measured kernel by kernel on a GPU: its time is nobody's latency.
    overrun: tokens that were computed beside these for sequences that had ended when the step was launched,
    which showed only later (asynchronous scheduling)."""

    slow: bool
    budget: Count
    decode_tokens: Count
    prefill_tokens: Count
    t_schedule: Duration
    t_prepare: Duration
    t_forward: Duration
    t_sample: Duration
    t_gpu: Duration | None
    queues: dict[str, Count]
    free: Count
    active: Count
    cached: Count
    overrun: Count = 0


POOL_EVENTS = (
    BlocksAllocated,
    BlocksTouched,
    BlocksCopied,
    BlocksReleased,
    BlocksStored,
    BlocksEvicted,
    CacheCleared,
)
"""The only events that change pool state."""

ALL_EVENTS: tuple[type[Event], ...] = (
    *POOL_EVENTS,
    PoolSnapshot,
    ModelLoading,
    EngineStarted,
    EngineStopped,
    EngineError,
    HitAudited,
    DeviceSample,
    KernelsProfiled,
    GraphCaptured,
    RequestQueued,
    PrefixLookup,
    AdmissionBlocked,
    RequestAdmitted,
    RequestPreempted,
    RequestFinished,
    StepScheduled,
    TokensSampled,
    TokenLogprobs,
    TokenPieces,
    SequenceForked,
    BeamPruned,
    DraftVerified,
    StepCompleted,
)


class StepBatch(msgspec.Struct, frozen=True, gc=False):
    """Every mutation since the last batch, in order.

    seq: contiguous from 0. t: seconds, monotonic. step: engine steps begun so far. first_event:
    running index of events[0] over the whole stream.
    """

    seq: int
    t: float
    step: int
    first_event: int
    events: list[Any]


# ------------------------------------------------------------------------------------------- JSON

_encoder = msgspec.json.Encoder()
_tags = {t.__name__: msgspec.json.Decoder(t) for t in ALL_EVENTS}


class _RawBatch(msgspec.Struct):
    seq: Count
    t: Duration
    step: Count
    first_event: Count
    events: list[msgspec.Raw]


class _Tag(msgspec.Struct):
    type: str


_raw_decoder = msgspec.json.Decoder(_RawBatch)
_tag_decoder = msgspec.json.Decoder(_Tag)


class UnknownEvent(msgspec.Struct, frozen=True):
    """An event type of a newer minor version: skipped by readers, kept so that indices still hold."""

    type: str


def encode_batch(batch: StepBatch) -> bytes:
    """One line of JSON without its newline."""
    return _encoder.encode(batch)


def decode_batch(line: bytes | str) -> StepBatch:
    """Inverse of `encode_batch`.

    Unknown event types become `UnknownEvent`. Raises msgspec.DecodeError (a ValidationError for a
    known type with wrong fields) on anything else that is not a batch.
    """
    raw = _raw_decoder.decode(line)
    events: list[Any] = []
    for item in raw.events:
        tag = _tag_decoder.decode(item).type
        decoder = _tags.get(tag)
        try:
            events.append(UnknownEvent(tag) if decoder is None else decoder.decode(item))
        except msgspec.ValidationError as error:
            raise msgspec.ValidationError(f"{tag}: {error}") from None
    return StepBatch(raw.seq, raw.t, raw.step, raw.first_event, events)


# ------------------------------------------------------------------------------------------- runs


def to_runs(ids: Iterable[int]) -> list[int]:
    """[5, 6, 7, 3, 2, 9] -> [5, 3, 3, -2, 9, 1]: pairs (first, count), count < 0 downwards."""
    runs: list[int] = []
    first = last = count = step = 0
    for i in ids:
        if count and i == last + 1 and step >= 0:
            step, count = 1, count + 1
        elif count and i == last - 1 and step <= 0:
            step, count = -1, count + 1
        else:
            if count:
                runs += (first, -count if step < 0 else count)
            first, count, step = i, 1, 0
        last = i
    if count:
        runs += (first, -count if step < 0 else count)
    return runs


def from_runs(runs: list[int]) -> Iterator[int]:
    """Inverse of `to_runs`."""
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        yield from range(first, first + count) if count >= 0 else range(first, first + count, -1)
