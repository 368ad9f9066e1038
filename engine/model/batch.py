"""Persistent rows: block tables, sampling parameters and last tokens of live sequences, on the device.

Owns the mapping sequence id -> row. A step applies deltas (Row.table, Plan.retired) and never rebuilds a table.
Everything that a step needs goes to the device in one copy. The host does not wait for it, and it is queued in the
stream, so the step before may still be running. Invariant: no real token is written into the null block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from engine.events import NULL_BLOCK
from engine.ops.base import Extras, Ops, StepInput
from engine.ops.sampler import PARAMS, SampleRows
from engine.step.runner import NewSequence, Plan, Row

PENDING = -1
"""Placeholder for a token that only the device knows so far."""


class DeviceRows:
    """Rows for sequences. It grows if there are more sequences than `capacity`.

    ops: returns further arrays that a step needs on the device; without ops the back end copies them itself.
    vocab_size: the largest effective top_k.
    """

    def __init__(
        self,
        capacity: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        ops: Ops | None = None,
        vocab_size: int = 2**31 - 1,
    ) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self.block_size = block_size
        self.device = device
        self._rows: dict[int, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._tables = np.zeros((capacity, max_blocks), np.int32)
        self._host = torch.from_numpy(self._tables)
        self._device = self._host if device.type == "cpu" else self._host.to(device)
        self._params = np.zeros(capacity, PARAMS)
        self._last = torch.zeros(capacity, dtype=torch.int64, device=device)
        self._drawing = self._last
        """The row of each token that the newest step draws, int64 [L]."""
        self._changed: list[tuple[int, int, int]] = []
        """Parts of tables that are not on the device yet: (row, from, to)."""

    def apply(self, plan: Plan) -> tuple[StepInput, SampleRows]:
        """Apply the changes since the last step, and make the input of this step.

        Raises ValueError if a token would be written into the null block or beyond its table.
        """
        for seq_id in plan.retired:
            row = self._rows.pop(seq_id, None)
            if row is not None:
                self._free.append(row)
        rows = np.fromiter(map(self._update, plan.rows), np.int32, len(plan.rows))
        start = np.fromiter((r.start for r in plan.rows), np.int64, len(rows))
        n = np.fromiter((r.n for r in plan.rows), np.int64, len(rows))
        ends = np.cumsum(n)
        total = int(ends[-1]) if len(rows) else 0
        positions = np.arange(total) + np.repeat(start - (ends - n), n)
        logical, offset = np.divmod(positions, self.block_size)
        blocks = self._tables[np.repeat(rows, n), logical].astype(np.int64)
        if (blocks == NULL_BLOCK).any():
            raise ValueError("a token's slot is in the null block: its table is too short")
        draws = [(i, b, k) for i, r in enumerate(plan.rows) for k, b in enumerate(r.draws)]
        sampled = np.fromiter((i for i, _, _ in draws), np.int64, len(draws))
        # The number of tokens in the row after the token that is drawn: drafts.
        behind = np.fromiter((max(0, plan.rows[i].drafts - k) for i, _, k in draws), np.int64, len(draws))
        params = self._params[rows[sampled]]
        params["branch"] = [b for _, b, _ in draws]
        kv_lens = start + n
        q_lens_host, kv_lens_host = n.tolist(), kv_lens.tolist()
        drawn_rows = SampleRows(params, kv_lens[sampled] - behind)
        extras = self._ops.extras(q_lens_host, kv_lens_host, drawn_rows) if self._ops else Extras()
        host_ids = _tokens(plan.rows)
        pending = np.flatnonzero(host_ids == PENDING)
        upload = _Upload()
        token_ids = upload.add(host_ids)
        slots = upload.add(blocks * self.block_size + offset)
        logit_rows = upload.add(ends[sampled] - 1 - behind)
        drawing = upload.add(rows[sampled].astype(np.int64))
        positions_ = upload.add(positions.astype(np.int32))
        row_ids = upload.add(rows)
        q_starts = upload.add(np.concatenate(([0], ends)).astype(np.int32))
        lens = upload.add(kv_lens.astype(np.int32))
        work = [upload.add(array) for array in extras.work]
        sampling = None if extras.sampling is None else upload.add(extras.sampling)
        waiting = (upload.add(pending), upload.add(np.repeat(rows, n)[pending].astype(np.int64)))
        where, blocks_there = self._table_changes()
        places, changed = upload.add(where), upload.add(blocks_there)
        there = self._upload(upload.arrays)
        if sampling is not None:
            drawn_rows.sent = there[sampling]
        if len(pending):
            there[token_ids].index_copy_(0, there[waiting[0]], self._last[there[waiting[1]]])
        if len(there[places]):
            self._device.view(-1).index_copy_(0, there[places], there[changed])
        self._drawing = there[drawing]
        batch = StepInput(
            token_ids=there[token_ids],
            positions=there[positions_],
            slots=there[slots],
            tables=self._device,
            rows=there[row_ids],
            q_starts=there[q_starts],
            kv_lens=there[lens],
            logit_rows=there[logit_rows],
            q_lens=q_lens_host,
            kv_lens_host=kv_lens_host,
            work=[there[i] for i in work],
            note=extras.note,
        )
        return batch, drawn_rows

    def drawn(self, tokens: torch.Tensor) -> None:
        """Keep the tokens that the newest step drew, int64 [L] on the device.

        The next step may start from them before the host has read them. If a row draws several tokens, any of them is
        kept. -1 becomes 0.
        """
        self._last.index_copy_(0, self._drawing, tokens.clamp(min=0))

    def _update(self, row: Row) -> int:
        """The row of the sequence, with an updated table and, for a new sequence, its parameters."""
        at = self._rows.get(row.seq_id)
        if row.new is not None:
            if at is None:
                at = self._rows[row.seq_id] = self._new_row()
            self._params[at] = self._sampling(row.new)
        if at is None:
            raise ValueError(f"sequence {row.seq_id} has no row, and its plan does not say what it is")
        if row.table:
            first, end = row.table_from, row.table_from + len(row.table)
            self._tables[at, first:end] = row.table
            if self._device is not self._host:
                self._changed.append((at, first, end))
        return at

    def _sampling(self, new: NewSequence) -> tuple[float | int, ...]:
        """A record of PARAMS. top_k is at most the size of the vocabulary."""
        p = new.params
        top_k = min(p.top_k or 0, self._vocab_size)
        return p.temperature or 0, p.top_p or 1, p.min_p or 0, top_k, p.seed or 0, new.branch

    def _new_row(self) -> int:
        if not self._free:
            n = len(self._host)
            self._tables = np.concatenate((self._tables, np.zeros_like(self._tables)))
            self._host = torch.from_numpy(self._tables)
            self._device = self._host if self.device.type == "cpu" else self._host.to(self.device)
            self._params = np.concatenate((self._params, np.zeros_like(self._params)))
            self._last = torch.cat((self._last, torch.zeros_like(self._last)))
            self._free = list(range(2 * n - 1, n - 1, -1))
        return self._free.pop()

    def _table_changes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """(positions in the flat tables, blocks at them) that are not on the device yet."""
        if not self._changed:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        width = self._tables.shape[1]
        places = [np.arange(row * width + a, row * width + b) for row, a, b in self._changed]
        blocks = [self._tables[row, a:b] for row, a, b in self._changed]
        self._changed.clear()
        return np.concatenate(places), np.concatenate(blocks)

    def _upload(self, arrays: list[NDArray[np.generic]]) -> list[torch.Tensor]:
        """The arrays on the device. On a CPU they stay where they are."""
        if self.device.type == "cpu":
            return [torch.from_numpy(np.ascontiguousarray(a)) for a in arrays]
        return packed(arrays, pin=True, copy=lambda t: t.to(self.device, non_blocking=True))


class _Upload:
    """Arrays that are copied to the device together. `add` returns the index of an array."""

    def __init__(self) -> None:
        self.arrays: list[NDArray[np.generic]] = []

    def add(self, array: NDArray[np.generic]) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1


def packed(
    arrays: list[NDArray[np.generic]], *, pin: bool, copy: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """The arrays after one `copy` of a buffer with all of them.

    Each array starts at a multiple of 16 bytes, because a kernel is compiled separately for other pointers. pin: the
    buffer is page-locked, so that the copy runs while the host continues. torch keeps the buffer until then.
    """
    starts = np.cumsum([0, *(a.nbytes + -a.nbytes % 16 for a in arrays)]).tolist()
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
    host = buffer.numpy()
    for a, at in zip(arrays, starts, strict=False):
        host[at : at + a.nbytes] = a.view(np.uint8)
    there = copy(buffer)
    return [
        there[at : at + a.nbytes].view(torch.from_numpy(a).dtype)
        for a, at in zip(arrays, starts, strict=False)
    ]


def _tokens(rows: list[Row]) -> NDArray[np.int64]:
    """Token ids of the step, flat. PENDING for tokens that a step in flight has not sampled yet."""
    if all(r.n == 1 for r in rows):
        return np.fromiter((r.tokens[0] if r.tokens else PENDING for r in rows), np.int64, len(rows))
    parts = [np.asarray(r.tokens or (PENDING,), dtype=np.int64) for r in rows]
    return np.concatenate(parts)
