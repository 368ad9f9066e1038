"""Law of requests: the order queued, looked up, admitted, preempted, finished, and the usage at the end.

Owns the records of requests and their first branches.
"""

from __future__ import annotations

from engine import events as ev
from kvtop.record.audit.books import Life, need
from kvtop.record.audit.law import Law, takes


class RequestLaw(Law):
    """See the module."""

    @takes(ev.RequestQueued)
    def on_queued(self, e: ev.RequestQueued) -> None:
        need(e.request_id not in self.books.lives, f"request {e.request_id} is queued twice")
        prompt = len(e.prompt_token_ids) or max((end for _, end, _, _ in e.spans), default=0)
        asked = e.params.get("n", e.n)
        need(e.n == asked, f"n is {e.n}, its params say {asked}")
        self.books.lives[e.request_id] = self.books.unfinished[e.request_id] = Life(
            e, prompt, searches=e.params.get("beam_width", 1) > 1
        )

    @takes(ev.PrefixLookup)
    def on_lookup(self, e: ev.PrefixLookup) -> None:
        life = self.books.life(e.request_id)
        need(life.lookup is None, "a look-up, but no admission followed the last one")
        need(life.phase == ("preempted" if e.resumed else "queued"), f"a look-up while {life.phase}")
        length = life.leader.length if life.leader else life.prompt
        need(e.prompt_tokens == length, f"{e.prompt_tokens} tokens looked up, the sequence has {length}")
        need(
            len(e.hashes) == max(0, length - 1) // self.books.size,
            f"{len(e.hashes)} hashes were looked up, {max(0, length - 1) // self.books.size} blocks can be",
        )
        need(
            e.hit_tokens == e.hit_blocks * self.books.size,
            f"{e.hit_tokens} tokens in {e.hit_blocks} blocks hit",
        )
        need(
            e.queried_blocks == len(e.hashes),
            f"{e.queried_blocks} blocks queried, {len(e.hashes)} hashes asked for",
        )
        need(e.hit_blocks <= e.queried_blocks, f"{e.hit_blocks} blocks hit of {e.queried_blocks} queried")
        found = 0
        while found < len(e.hashes) and e.hashes[found] in self.books.mirror.where:
            found += 1
        need(e.hit_blocks == found, f"{e.hit_blocks} blocks hit, the hash table has {found}")
        if not self.books.redacted:
            branch = life.leader or self.books.first_branch(life, -1)
            for i, h in enumerate(e.hashes):
                need(
                    h == self.books.block_hash(branch, i),
                    f"hash {i} does not follow from the prompt's tokens",
                )
        life.lookup = e

    @takes(ev.AdmissionBlocked)
    def on_blocked(self, e: ev.AdmissionBlocked) -> None:
        life = self.books.life(e.request_id)
        need(life.phase in ("queued", "preempted"), f"blocked while {life.phase}")
        need(e.need > e.free, f"blocked although {e.need} are needed and {e.free} are free")
        if e.reason == "blocks":
            queue = self.books.mirror.num_blocks - 1 - self.books.mirror.active
            need(e.free <= queue, f"{e.free} blocks are free, but the queue has {queue}")

    @takes(ev.RequestAdmitted)
    def on_admitted(self, e: ev.RequestAdmitted) -> None:
        life = self.books.life(e.request_id)
        need(
            life.phase == ("preempted" if e.resumed else "queued"),
            f"{'resumed' if e.resumed else 'admitted'} while {life.phase}",
        )
        if e.resumed:
            need(
                life.leader is not None and e.seq_id == life.leader.seq_id,
                f"resumed as sequence {e.seq_id}, which is not the one that was preempted first",
            )
        else:
            need(e.seq_id not in self.books.branches, f"sequence {e.seq_id} exists already")
            branch = self.books.first_branch(life, e.seq_id)
            life.branches.append(branch)
            life.leader = branch
            self.books.branches[e.seq_id] = branch
            life.cached = e.cached_tokens
        lookup = life.lookup
        if lookup is None:
            need(not self.books.caching, "admitted without a PrefixLookup")
            need(e.cached_tokens == 0, "cached tokens without a look-up")
        else:
            need(lookup.resumed == e.resumed, "its look-up has another value of `resumed`")
            need(
                lookup.hit_tokens == e.cached_tokens,
                f"{e.cached_tokens} cached tokens, the look-up hit {lookup.hit_tokens}",
            )
        life.looked_up, life.phase = lookup is not None, "running"
        for branch in life.branches:
            branch.known = branch.length

    @takes(ev.RequestPreempted)
    def on_preempted(self, e: ev.RequestPreempted) -> None:
        life = self.books.life(e.request_id)
        need(life.phase == "running", f"preempted while {life.phase}")
        for i in e.seq_ids:
            need(not self.books.mirror.tables.get(i), f"preempted, but sequence {i} still holds blocks")
        lost = sum(self.books.branch(i).computed for i in e.seq_ids)
        need(lost == e.tokens_lost, f"{e.tokens_lost} tokens lost, {lost} were computed")
        for i in e.seq_ids:
            self.books.branch(i).computed = 0
        life.leader = self.books.branch(e.seq_ids[0]) if e.seq_ids else None
        life.phase, life.lookup = "preempted", None
        life.preemptions += 1

    @takes(ev.RequestFinished)
    def on_finished(self, e: ev.RequestFinished) -> None:
        life = self.books.life(e.request_id)
        was, life.phase = life.phase, "finished"
        self.books.unfinished.pop(e.request_id, None)
        need(was != "finished", "finished twice")
        for branch in life.branches:
            need(
                not self.books.mirror.tables.get(branch.seq_id),
                f"finished, but {branch.seq_id} still holds blocks",
            )
        need(e.reason not in ("stop", "length") or was == "running", f"{e.reason} while {was}")
        need(e.reason != "refused" or not life.branches, "refused after its admission")
        bad = not life.searches and any(b.bad for b in life.branches)
        need(not bad or e.reason in ("error", "abort"), "its logits were not finite, but it did not fail")
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
            said = getattr(u, name)
            need(said == value, f"usage: {name} is {said}, the events give {value}")

    def close(self) -> None:
        """The stream is over."""
        need(not self.books.unfinished, f"request {next(iter(self.books.unfinished), 0)} never finished")
