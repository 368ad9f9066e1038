"""The event schema: the contract between an engine, which changes KV blocks, and the readers of its events.

Owns the types and their JSON form; imports no torch. Two laws hold for every stream. Replaying the seven pool events
gives ref counts, hashes, tables and the exact order of the free queue at every step. `seq` and `first_event` are
contiguous, so a missing batch or event is visible. A new type, or a new field with a default, keeps `SCHEMA`, since
readers may skip it. A field that is removed, is renamed or gets another meaning needs a new `SCHEMA`. CHANGELOG.md has
both kinds of changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

import msgspec

SCHEMA = 1
"""Major version of the contract. Readers refuse a newer one and skip unknown event types."""

NULL_BLOCK = 0
"""Physical block that is never handed out; the pool's queue starts as 1..num_blocks-1."""

# The ranges of numbers. They are checked when a stream is read. Creating an event checks nothing, so it costs nothing.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
"""A number of things, an index, or an id."""
Block = Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
"""A physical block. The null block is in no event."""
Work = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
"""Bytes or floating-point operations of one step."""
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
"""A whole number that may be negative."""
Token = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
"""A token id; hashes cover it as an int32."""
Seconds = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""An instant. One before the start of the stream is negative."""
Number = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]
"""A finite figure that may be negative."""
Duration = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A length of time in seconds."""
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
"""A measured quantity, such as bytes/s."""
Hash = Annotated[str, msgspec.Meta(min_length=32, max_length=32)]
"""32 hex digits."""

_Bytes = bytes
"""A class below has a field `bytes`, which hides the type of that name."""


class Event(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag=True):
    """Base of all events. In JSON the first key is `type`, the name of the class."""


# ------------------------------------------------------------------ pool: only these seven change it


class BlocksAllocated(Event, frozen=True):
    """Popped from the head of the queue in this order; ref = 1; appended to the table of the sequence."""

    seq_id: Count
    ids: list[Block]


class BlocksTouched(Event, frozen=True):
    """Removed from the queue if ref was 0; ref + 1; appended to the table of the sequence."""

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
    """The last len(ids) entries of the table, last first; ref - 1 each.

    Blocks that are now at ref 0 enter the queue: those without a hash at its head, as one group in this order; those
    with a hash at its tail, in this order.
    """

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
    """These blocks lose their hash. The queue does not change.

    reallocated: `by_seq` takes them for new content (its BlocksAllocated or BlocksCopied comes next). unwritten: they
    were published for a forward that did not run. invalid: their KV is bad (NaN logits, or an audit).
    """

    ids: list[Block]
    hashes: list[Hash]
    by_seq: Count | None
    why: Literal["reallocated", "unwritten", "invalid"]


class CacheCleared(Event, frozen=True):
    """All blocks lose their hash. The queue does not change."""


class PoolSnapshot(Event, frozen=True):
    """The state of the pool between two steps, made by the pool itself. It is the last event of its batch.

    refs: triples [first, count, ref, ...] over the blocks with ref > 0, ascending.
    queue: pairs [first, count, ...], head first; a negative count goes downwards (5, -3 = 5, 4, 3).
    hashed_ids / hashes: every block with a hash, ascending by id.
    seq_ids / tables / computed: live sequences, their block tables and their computed tokens.
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
    """Progress of a start. `done` and `total` have the unit of `what` (bytes for files)."""

    done: Count
    total: Count
    what: str


Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""Bytes, or a seed."""


class Knobs(msgspec.Struct, frozen=True, gc=False):
    """The settings of the engine: the fields of EngineConfig that EngineStarted does not have, and what the start
    chose.

    The defaults are those of EngineConfig. A reader ignores unknown keys.
    """

    revision: str | None = None
    quantization: str | None = None
    ops: str = "auto"
    """The kernels that the start chose."""
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
    # ---- chosen by the start
    kv_cache: str | None = None
    """The size of the KV memory and how it is calculated, in words."""
    notice: str | None = None
    """What a user should know about this model."""
    special_tokens: list[str] = []
    """Names of the special tokens, as they are written in a text."""
    machine: str | None = None
    """The simulated machine."""
    weights: str | None = None
    """Format of the simulated weights."""
    speed: Duration | None = None
    """Simulated seconds per second. None: as fast as possible, or not simulated."""


class EngineStarted(Event, frozen=True):
    """First event of a run, except ModelLoading. Pool events come only after it."""

    schema: Count
    source: Literal["live", "simulated", "recorded", "remote"]
    capabilities: list[str]
    """What this source reports: blocks, text, timings, device. Panels say what is missing."""
    model: str
    device: str
    dtype: str
    num_blocks: Count
    """Physical blocks, the null block included."""
    block_size: Count
    bytes_per_block: Count
    weights_bytes: Count
    hash_seed: int | None
    """None in a redacted recording, whose hashes cannot be recomputed."""
    epoch: Seconds
    """Unix time at t = 0 of the batches."""
    max_model_len: Count
    knobs: Knobs
    """Every other setting of the engine."""


class EngineStopped(Event, frozen=True):
    """Last event of a complete stream."""

    reason: str = "stopped"


class EngineError(Event, frozen=True):
    """Something failed. fatal: the engine stops. Otherwise it continues without `request_id`."""

    message: str
    request_id: Count | None = None
    fatal: bool = False


class HitAudited(Event, frozen=True):
    """The blocks that a request read from the cache were computed again (--audit).

    blocks: those that were compared. bad: those whose KV is not that of their tokens; an EngineError and a
    BlocksEvicted with `invalid` follow. error: the largest relative distance, None if it is not finite. tolerance: its
    limit.
    """

    request_id: Count
    blocks: list[Block]
    bad: list[Block]
    error: Amount | None
    tolerance: Amount


class DeviceSample(Event, frozen=True):
    """util in percent, memory in bytes, power in W, temperature in degrees Celsius, bandwidth in bytes/s. None: the
    device does not report it."""

    util: Amount | None = None
    memory: Count | None = None
    memory_total: Count | None = None
    power: Amount | None = None
    temperature: Number | None = None
    bandwidth: Amount | None = None


class KernelsProfiled(Event, frozen=True):
    """The time of one forward by kernel: columns, with a row for each kernel, summed over all layers.

    calls: number of calls. seconds: time on the device. bytes, flops: the least that these shapes must move and
    compute. forward: seconds from the start of the first kernel to the end of the last one, including gaps. bandwidth
    (bytes/s) and peak (FLOP/s): measured on this device; None: not known.
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
    """From now on steps that decode up to `bucket` sequences run as one CUDA graph.

    graphs: number of graphs with this one; 1 if all others were dropped; 0 if the capture failed and steps run without
    graphs. seconds: time of the capture.
    """

    bucket: Count
    graphs: Count
    seconds: Duration


# --------------------------------------------------------------------------------------- requests


class Timings(msgspec.Struct, frozen=True, gc=False):
    """Instants in seconds on the batches' clock. None: the request did not get so far."""

    t_arrival: Seconds
    t_admitted: Seconds | None = None
    t_first_token: Seconds | None = None
    t_last_token: Seconds | None = None
    t_finished: Seconds | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Numbers of tokens. cached + computed = prompt at the first admission. cache_write: prompt tokens in blocks that
    this request published. recomputed: computed again after preemptions."""

    prompt_tokens: Count
    cached_tokens: Count
    computed_tokens: Count
    cache_write_tokens: Count
    output_tokens: Count
    preemptions: Count = 0
    recomputed_tokens: Count = 0


class RequestQueued(Event, frozen=True):
    """A request entered the waiting queue.

    spans: (start, end, role, name) over prompt tokens. position: its index in the queue. -1: it is refused at once, or
    an older recording does not say; then it is at the end.
    """

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
    """A look-up in the hash table, once per admission. hashes: every full block of the sequence that may be a hit.

    Later look-ups of a running prefill emit only BlocksTouched.
    """

    request_id: Count
    hashes: list[Hash]
    hit_blocks: Count
    queried_blocks: Count
    hit_tokens: Count
    prompt_tokens: Count
    resumed: bool = False
    template_rewrote_history: bool = False


class AdmissionBlocked(Event, frozen=True):
    """The head of the waiting queue cannot be admitted. Emitted only when the request or the reason changes.

    need: what it needs; free: what there is. reason `blocks`: blocks, without those that running prompts will take.
    `watermark`: the same, without the reserve. `max_num_seqs`: sequences. `max_num_batched_tokens` (without chunked
    prefill): tokens.
    """

    request_id: Count
    need: Count
    free: Count
    reason: str


class RequestAdmitted(Event, frozen=True):
    """The request starts to run. cached_tokens: tokens that it reads from the cache instead of computing them."""

    request_id: Count
    seq_id: Count
    cached_tokens: Count
    resumed: bool = False


class RequestPreempted(Event, frozen=True):
    """The request goes back to the waiting queue, to index `position`. Its BlocksReleased came before.

    position -1: an older recording does not say; then it is at the front.
    """

    request_id: Count
    seq_ids: list[Count]
    tokens_lost: Count
    """Computed tokens whose KV was released. Some of it may come back as cache hits."""
    position: Whole = -1


class RequestFinished(Event, frozen=True):
    """reason: stop, length, abort, error or refused. `error`: the reason in words, for the last two."""

    request_id: Count
    reason: Literal["stop", "length", "abort", "error", "refused"]
    timings: Timings
    usage: Usage
    error: str | None = None


# ------------------------------------------------------------------------------------------ steps


class StepScheduled(Event, frozen=True):
    """Columns, one row per scheduled sequence: tokens [start, start + n) are computed.

    It is in the same batch as the TokensSampled and StepCompleted of its step. If a step is launched while another one
    is in flight, its StepScheduled comes after the other one has finished. Then its pool events may be in the batch
    before, and sequences that have ended in the meantime have no row (StepCompleted.overrun).
    """

    seq_ids: list[Count]
    start: list[Count]
    n: list[Count]
    drafts: list[Count] = []


class TokensSampled(Event, frozen=True):
    """Columns, one event per step, with a row for every scheduled sequence that was executed.

    counts: tokens sampled in the row (0 for a chunk that is not the last). token_ids: flat over all rows. num_computed:
    after the step. text: the text that became visible, never half a character.
    """

    seq_ids: list[Count]
    token_ids: list[Token]
    counts: list[Count]
    num_computed: list[Count]
    text: list[str]


class TokenLogprobs(Event, frozen=True):
    """Columns, with a row for every token of the TokensSampled before, if its request asks for it.

    Natural logarithms of the model's probabilities, before penalties and filters. logprobs: of the sampled tokens.
    top_ids, top_logprobs: the k likeliest tokens, likeliest first.
    """

    seq_ids: list[Count]
    token_ids: list[Token]
    logprobs: list[Number]
    top_ids: list[list[Token]]
    top_logprobs: list[list[Number]]


class TokenPieces(Event, frozen=True):
    """Raw bytes of tokens at their first use in a stream, so no reader needs a tokenizer."""

    ids: list[Token]
    bytes: list[_Bytes]


class SequenceForked(Event, frozen=True):
    """A new branch begins with the tokens of its parent. Emitted before both sample."""

    request_id: Count
    parent: Count
    child: Count


class BeamPruned(Event, frozen=True):
    """A beam was dropped. Its BlocksReleased follows."""

    request_id: Count
    seq_id: Count


class DraftVerified(Event, frozen=True):
    """Numbers of draft tokens that were proposed and accepted for one sequence in one step."""

    seq_id: Count
    proposed: Count
    accepted: Count


class StepCompleted(Event, frozen=True):
    """The end of a step. Times in seconds; t_gpu is None without a GPU.

    slow: slow motion waited in this step, or it was timed kernel by kernel on a GPU. Such a step counts in no latency.
    queues: requests that are running, waiting and preempted (these are a part of the waiting ones). free: usable blocks
    that are neither referenced nor hashed; active: referenced; cached: hashed but not referenced; the sum of the three
    is num_blocks - 1. overrun: tokens that were also computed, for sequences whose end became known only after the
    launch (asynchronous scheduling).
    """

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
"""Only these events change the state of the pool."""

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
    """All events since the last batch, in order.

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
    """An event type of a newer version. Readers skip it; it is kept so that the indices of events stay right."""

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
    """[5, 6, 7, 3, 2, 9] -> [5, 3, 3, -2, 9, 1]: pairs (first, count); a negative count goes downwards."""
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
