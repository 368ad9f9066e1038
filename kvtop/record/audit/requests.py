"""Laws of a request's life: queued, looked up, admitted, preempted, finished, and the figures at its end."""

from __future__ import annotations

from engine import events as ev
from kvtop.record.audit.books import Books, Life, need


class RequestLaws(Books):
    """One method a kind of event."""

    def _on_queued(self, e: ev.RequestQueued) -> None:
        need(e.request_id not in self.lives, f"request {e.request_id} is queued twice")
        prompt = len(e.prompt_token_ids) or max((end for _, end, _, _ in e.spans), default=0)
        self.lives[e.request_id] = self.unfinished[e.request_id] = Life(
            e, prompt, searches=e.params.get("beam_width", 1) > 1
        )
        self._used.update(t for t in e.prompt_token_ids if t >= 0)

    def _on_lookup(self, e: ev.PrefixLookup) -> None:
        life = self._life(e.request_id)
        need(life.lookup is None, "a look-up, but its last one led to no admission")
        need(life.phase == ("preempted" if e.resumed else "queued"), f"a look-up while {life.phase}")
        length = life.leader.length if life.leader else life.prompt
        need(e.prompt_tokens == length, f"{e.prompt_tokens} tokens looked up, the sequence has {length}")
        need(
            len(e.hashes) == max(0, length - 1) // self.size,
            f"{len(e.hashes)} hashes asked for, {max(0, length - 1) // self.size} blocks could be",
        )
        need(e.hit_tokens == e.hit_blocks * self.size, f"{e.hit_tokens} tokens in {e.hit_blocks} blocks hit")
        need(e.hit_blocks <= e.queried_blocks <= len(e.hashes), "hit <= queried <= asked does not hold")
        found = 0
        while found < len(e.hashes) and e.hashes[found] in self.mirror.where:
            found += 1
        need(e.hit_blocks == found, f"{e.hit_blocks} blocks hit, the hash table has {found}")
        if not self.redacted:
            branch = life.leader or self._first(life, -1)
            for i, h in enumerate(e.hashes):
                need(h == self._hash(branch, i), f"hash {i} does not follow from the prompt's tokens")
        life.lookup = e

    def _on_blocked(self, e: ev.AdmissionBlocked) -> None:
        life = self._life(e.request_id)
        need(life.phase in ("queued", "preempted"), f"blocked while {life.phase}")
        need(e.need > e.free, f"blocked although {e.need} are needed and {e.free} are there")
        if e.reason == "blocks":
            queue = self.mirror.num_blocks - 1 - self.mirror.active
            need(e.free <= queue, f"{e.free} blocks free, the queue holds {queue}")

    def _on_admitted(self, e: ev.RequestAdmitted) -> None:
        life = self._life(e.request_id)
        need(
            life.phase == ("preempted" if e.resumed else "queued"),
            f"{'resumed' if e.resumed else 'admitted'} while {life.phase}",
        )
        if e.resumed:
            need(e.seq_id in self._branches, f"resumed as an unknown sequence {e.seq_id}")
        else:
            need(e.seq_id not in self._branches, f"sequence {e.seq_id} exists already")
            branch = self._first(life, e.seq_id)
            life.branches.append(branch)
            life.leader = branch
            self._branches[e.seq_id] = branch
            life.cached = e.cached_tokens
        lookup = life.lookup
        if lookup is None:
            need(not self._caching, "admitted without a PrefixLookup")
            need(e.cached_tokens == 0, "cached tokens without a look-up")
        else:
            need(lookup.resumed == e.resumed, "the look-up before says otherwise about being resumed")
            need(
                lookup.hit_tokens == e.cached_tokens,
                f"{e.cached_tokens} cached tokens, the look-up hit {lookup.hit_tokens}",
            )
        life.looked_up, life.phase = lookup is not None, "running"
        for branch in life.branches:
            branch.known = branch.length

    def _on_preempted(self, e: ev.RequestPreempted) -> None:
        life = self._life(e.request_id)
        need(life.phase == "running", f"preempted while {life.phase}")
        for i in e.seq_ids:
            need(not self.mirror.tables.get(i), f"preempted, but sequence {i} still holds blocks")
        lost = sum(self._branch(i).computed for i in e.seq_ids)
        need(lost == e.tokens_lost, f"{e.tokens_lost} tokens lost, {lost} were computed")
        for i in e.seq_ids:
            self._branch(i).computed = 0
        life.leader = self._branch(e.seq_ids[0]) if e.seq_ids else None
        life.phase, life.lookup = "preempted", None
        life.preemptions += 1

    def _on_finished(self, e: ev.RequestFinished) -> None:
        life = self._life(e.request_id)
        was, life.phase = life.phase, "finished"
        self.unfinished.pop(e.request_id, None)
        need(was != "finished", "finished twice")
        for branch in life.branches:
            need(
                not self.mirror.tables.get(branch.seq_id), f"finished, but {branch.seq_id} still holds blocks"
            )
        need(e.reason not in ("stop", "length") or was == "running", f"{e.reason} while {was}")
        need(e.reason != "refused" or not life.branches, "refused after its admission")
        bad = not life.searches and any(b.bad for b in life.branches)
        need(not bad or e.reason in ("error", "abort"), "its logits were not finite, yet it did not fail")
        u, cached = e.usage, life.cached or 0
        want = {
            "prompt_tokens": life.prompt,
            "cached_tokens": cached,
            "computed_tokens": life.prompt - cached if life.cached is not None else 0,
            "cache_write_tokens": life.cache_write,
            "output_tokens": sum(b.length - life.prompt for b in life.branches if not b.pruned),
            "preemptions": life.preemptions,
            "recomputed_tokens": life.recomputed,
        }
        for name, value in want.items():
            told = getattr(u, name)
            need(told == value, f"usage says {name} {told}, the events {value}")
        t = e.timings
        instants = [x for x in (t.t_arrival, t.t_admitted, t.t_first_token, t.t_last_token) if x is not None]
        need(instants == sorted(instants), "its instants are out of order")
        need((t.t_first_token is None) == (life.output == 0), "a first token without output, or the reverse")
