"""RequestRules: what the events of the engine, of requests and of steps do to the facts.

Owns a request's phases, its tokens, its instants and the latencies that follow from them. Steps that slow
motion stretched add to no latency.
"""

from __future__ import annotations

from bisect import insort
from typing import Any

from engine import events as ev
from kvtop.state.explain import Look, judge
from kvtop.state.facts import Facts, drop
from kvtop.state.history import History
from kvtop.state.pool_mirror import StateError
from kvtop.state.pool_view import PoolView
from kvtop.state.requests import RequestView, SequenceView
from kvtop.units import duration

MOST_BLOCKS = 1 << 24
"""A stream that claims more physical blocks than this is not believed."""


class RequestRules(Facts):
    """One method a kind of event."""

    # ---------------------------------------------------------------------------------- the engine

    def _on_loading(self, e: ev.ModelLoading) -> None:
        self.loading = e

    def _on_started(self, e: ev.EngineStarted) -> None:
        if self.started is not None:
            raise StateError("a second EngineStarted")
        if not 2 <= e.num_blocks <= MOST_BLOCKS or e.block_size < 1:
            raise StateError(f"EngineStarted: {e.num_blocks} blocks of {e.block_size} tokens cannot be")
        self.started = e
        self.pool = PoolView(e.num_blocks, e.block_size)
        self.history = History(max(4 * e.num_blocks, 20_000))
        self.generation += 1

    def _on_stopped(self, e: ev.EngineStopped) -> None:
        self.stopped = e

    def _on_error(self, e: ev.EngineError) -> None:
        self.errors.append(e)
        del self.errors[:-1000]
        self._moment("error", request_id=e.request_id, detail=e.message)

    def _on_audited(self, e: ev.HitAudited) -> None:
        self.audited_hits += 1
        self.audited_blocks += len(e.blocks)
        self.wrong_blocks += len(e.bad)

    def _on_device(self, e: ev.DeviceSample) -> None:
        self.device = e
        for name in ("util", "memory", "power"):
            value = getattr(e, name)
            if value is not None:
                getattr(self.series, name).add(self.t, value)

    def _on_profiled(self, e: ev.KernelsProfiled) -> None:
        counts = [n for _, *row in zip(e.names, e.calls, e.bytes, e.flops, strict=True) for n in row]
        times = [e.forward, *(s for _, s in zip(e.names, e.seconds, strict=True))]
        rates = [rate for rate in (e.bandwidth, e.peak) if rate is not None]
        if (
            min(counts, default=0) < 0
            or min(rates, default=1.0) < 1
            or not 0 <= min(times) <= max(times) < 1e6
        ):
            raise StateError("KernelsProfiled: figures that cannot be")
        self.profile = e
        told = f"{e.tokens:,} token{'s' * (e.tokens != 1)}: {duration(e.forward)}"
        if e.names:
            told += f", longest {max(zip(e.seconds, e.names, strict=True))[1]}"
        self._moment("profiled", detail=told)

    def _on_graph(self, e: ev.GraphCaptured) -> None:
        if e.graphs <= 1:
            self.graphs = ()
        if e.graphs:
            self.graphs = tuple(sorted({*self.graphs, e.bucket}))
        told = f"captured in {duration(e.seconds)}" if e.graphs else "not captured, steps run without"
        self._moment("graph", detail=f"up to {e.bucket:,} sequence{'s' * (e.bucket != 1)}: {told}")

    # ------------------------------------------------------------------------------------ requests

    def _on_queued(self, e: ev.RequestQueued) -> None:
        tokens = len(e.prompt_token_ids) or max((end for _, end, _, _ in e.spans), default=0)
        self.requests[e.request_id] = RequestView(
            request_id=e.request_id,
            t_arrival=e.t_arrival,
            prompt_token_ids=e.prompt_token_ids,
            prompt_tokens=tokens,
            spans=e.spans,
            params=e.params,
            n=e.n,
            priority=e.priority,
            salt=e.salt,
            conversation=e.conversation,
            slow=self._slow,
            crowded=bool(self.running or self.waiting),
        )
        self._wait(self.requests[e.request_id])
        self._moment("queued", request_id=e.request_id)

    def _wait(self, view: RequestView, at_front: bool = False) -> None:
        """Into the waiting ones, in the order in which the engine will admit them."""
        if self.started is not None and self.started.knobs.get("scheduling_policy") == "priority":
            insort(self.waiting, view.request_id, key=self._rank)
        elif at_front:
            self.waiting.insert(0, view.request_id)
        else:
            self.waiting.append(view.request_id)

    def _rank(self, request_id: int) -> tuple[int, float, int]:
        view = self.requests[request_id]
        return view.priority, view.t_arrival, request_id

    def _on_lookup(self, e: ev.PrefixLookup) -> None:
        view = self.requests.get(e.request_id)
        if e.resumed:
            return
        self.lookups += 1
        self.query_tokens += e.prompt_tokens
        self.hit_tokens += e.hit_tokens
        self.series.hit_rate.add(self.t, self.hit_tokens / max(1, self.query_tokens))
        self.latest_lookup = e.request_id
        if view is None:
            return
        view.looked_up, view.t_lookup = True, self.t
        view.prompt_tokens = e.prompt_tokens
        view.lookup_hashes, view.hit_blocks, view.queried_blocks = e.hashes, e.hit_blocks, e.queried_blocks
        view.hit_tokens, view.template_rewrote_history = e.hit_tokens, e.template_rewrote_history
        running = (self.requests[i] for i in self.running)
        view.explanation = judge(Look(view, self.block_size, self.t, self.history, running, self._request_of))

    def _on_blocked(self, e: ev.AdmissionBlocked) -> None:
        view = self.requests.get(e.request_id)
        if view is not None:
            view.blocked = e
        self._moment("blocked", request_id=e.request_id, detail=f"{e.reason}: needs {e.need}, {e.free} free")

    def _on_admitted(self, e: ev.RequestAdmitted) -> None:
        sequence = self._sequence(e.seq_id)
        sequence.request_id = self._request_of[e.seq_id] = e.request_id
        sequence.num_computed = e.cached_tokens
        view = self.requests.get(e.request_id)
        if view is None:
            return
        if e.seq_id not in view.seq_ids:
            view.seq_ids.append(e.seq_id)
        sequence.branch = view.seq_ids.index(e.seq_id)
        if sequence.branch == 0:
            view.num_computed = e.cached_tokens
        view.phase, view.blocked = "running", None
        view.evicted_ids += sequence.evicted_ids
        sequence.evicted_ids = []
        if e.resumed:
            view.resumed += 1
            back = min(e.cached_tokens, view.tokens_lost - view.tokens_back)
            view.tokens_back += back
            self.tokens_back += back
        else:
            view.t_admitted = self.t
            view.cached_tokens = e.cached_tokens
            self._note_hits(view, e.seq_id)
        drop(self.waiting, e.request_id)
        drop(self.running, e.request_id)
        self.running.append(e.request_id)
        self._moment("admitted", request_id=e.request_id, detail="resumed" if e.resumed else "")

    def _on_preempted(self, e: ev.RequestPreempted) -> None:
        self.preemptions += 1
        for i in e.seq_ids:
            self._sequence(i).num_computed = 0
        view = self.requests.get(e.request_id)
        if view is None:
            return
        view.phase, view.chunk, view.num_computed = "preempted", None, 0
        view.preemptions += 1
        view.tokens_lost += e.tokens_lost
        self.tokens_lost += e.tokens_lost
        drop(self.running, e.request_id)
        drop(self.waiting, e.request_id)
        self._wait(view, at_front=True)
        self._moment("preempted", request_id=e.request_id, detail=f"{e.tokens_lost} tokens lost")

    def _on_finished(self, e: ev.RequestFinished) -> None:
        view = self.requests.get(e.request_id)
        if view is None:
            return
        view.usage, view.error = e.usage, e.error
        if view.dropped_ids:  # what beams sampled that were dropped is no output
            view.num_output = e.usage.output_tokens
        t = e.timings
        view.t_arrival = t.t_arrival
        view.t_admitted, view.t_first, view.t_last = t.t_admitted, t.t_first_token, t.t_last_token
        view.t_finished = self.t if t.t_finished is None else t.t_finished
        for i in view.seq_ids:
            sequence = self.sequences.get(i)
            if sequence is not None and sequence.table:
                if sequence.branch == 0:
                    view.last_table = sequence.table[:]
            else:
                self.sequences.pop(i, None)
        self.refused += e.reason == "refused"
        self._close(view, e.reason)
        self._moment("finished", request_id=e.request_id, detail=e.reason)

    # --------------------------------------------------------------------------------------- steps

    def _on_scheduled(self, e: ev.StepScheduled) -> None:
        self.scheduled = e
        if self._moved:  # what the step needs is allocated and copied now, and nothing is given back yet
            self._count_moved()
        prefill = 0
        for i, start, n in zip(e.seq_ids, e.start, e.n, strict=True):
            sequence = self._sequence(i)
            if start > sequence.num_computed:  # a running prefill found more in the cache
                sequence.num_computed = start
            view = self._view_of(sequence)
            if view is None or sequence.branch:
                continue
            in_prompt = max(0, min(n, view.prompt_tokens - start))
            view.chunk = (start, in_prompt) if in_prompt else None
            prefill += in_prompt
        if prefill:
            self.series.prefill.add(self.t, prefill)

    def _on_sampled(self, e: ev.TokensSampled) -> None:
        at = 0
        total = 0
        for i, count, computed, text in zip(e.seq_ids, e.counts, e.num_computed, e.text, strict=True):
            tokens = e.token_ids[at : at + count]
            at += count
            total += count
            sequence = self._sequence(i)
            if self.synced:
                self.pool.written(sequence.table, sequence.num_computed, computed, self.t)
            sequence.num_computed = computed
            view = self._view_of(sequence)
            if view is not None and not view.done:
                self._note_tokens(sequence, view, tokens, count, text)
        if total:
            self.output_tokens += total
            self.series.output.add(self.t, total)

    def _note_tokens(
        self, sequence: SequenceView, view: RequestView, tokens: list[int], count: int, text: str
    ) -> None:
        sequence.output_ids += tokens
        sequence.text += text
        view.num_output += count
        if sequence.branch == 0:
            view.num_computed = sequence.num_computed
            view.output_ids += tokens
            view.text += text
        if text:
            view.texts[sequence.seq_id] = sequence.text
        if not count:
            return
        if view.t_first is None:
            view.t_first = self.t
            if not view.slow:
                self.series.ttft.add(self.t, self.t - view.t_arrival, view.cached_tokens)
        elif sequence.t_last is not None and not self._slow:
            gap = (self.t - sequence.t_last) / count
            for _ in range(count):
                view.itl.append(gap)
                self.series.itl.add(self.t, gap, sequence.num_computed)
        sequence.t_last = view.t_last = self.t

    def _on_logprobs(self, e: ev.TokenLogprobs) -> None:
        for i, token, p, ids, top in zip(
            e.seq_ids, e.token_ids, e.logprobs, e.top_ids, e.top_logprobs, strict=True
        ):
            sequence = self._sequence(i)
            view = self._view_of(sequence)
            if view is not None and not view.done and not sequence.branch:
                others = [self._logprob(*pair) for pair in zip(ids, top, strict=True)]
                view.logprobs.append(self._logprob(token, p) | {"top": others})

    def _logprob(self, token: int, p: float) -> dict[str, Any]:
        return {"token": token, "text": self.text_of([token]), "logprob": round(p, 6)}

    def _on_pieces(self, e: ev.TokenPieces) -> None:
        self._pieces.update(zip(e.ids, e.bytes, strict=True))

    def _on_forked(self, e: ev.SequenceForked) -> None:
        parent, child = self._sequence(e.parent), self._sequence(e.child)
        child.request_id = self._request_of[e.child] = e.request_id
        child.num_computed = parent.num_computed
        child.output_ids, child.text, child.t_last = parent.output_ids[:], parent.text, parent.t_last
        view = self.requests.get(e.request_id)
        if view is not None:
            if e.child not in view.seq_ids:
                view.seq_ids.append(e.child)
            child.branch = view.seq_ids.index(e.child)
            if parent.text:
                view.texts[e.child] = parent.text

    def _on_pruned(self, e: ev.BeamPruned) -> None:
        sequence = self._sequence(e.seq_id)
        sequence.pruned = True
        view = self.requests.get(e.request_id)
        if view is None or e.seq_id not in view.seq_ids:
            return
        led = view.seq_ids[0] == e.seq_id
        view.seq_ids.remove(e.seq_id)
        view.texts.pop(e.seq_id, None)
        for place, i in enumerate(view.seq_ids):
            self._sequence(i).branch = place
        sequence.branch = -1
        view.dropped_ids.append(e.seq_id)
        if not sequence.table:
            self.sequences.pop(e.seq_id, None)
        if led and view.seq_ids:  # the beam that is read now
            heir = self._sequence(view.seq_ids[0])
            view.output_ids, view.text, view.num_computed = heir.output_ids[:], heir.text, heir.num_computed

    def _on_verified(self, e: ev.DraftVerified) -> None:
        self.drafts += e.proposed
        self.drafts_accepted += e.accepted

    def _on_completed(self, e: ev.StepCompleted) -> None:
        self.completed = e
        self.series.step.add(
            self.t, e.t_schedule + e.t_prepare + e.t_forward + e.t_sample, e.decode_tokens + e.prefill_tokens
        )
