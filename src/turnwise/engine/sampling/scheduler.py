"""Which sequences run next: continuous batching over a fixed pool of KV blocks.

Every step decodes one token for each running row and reads a limited piece of waiting prompts. The first row of a
request reads its prompt once; the other samples fork from it and share the full blocks. Requests with a common
beginning that arrive together (a group's attempts) do the same: one reads it, the others wait one step. If blocks run
out, the youngest running row gives its blocks back and waits with its tokens to be read again: nothing is lost, and
nothing fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from turnwise.engine.sampling.kvcache import BlockPool, Prefix
from turnwise.engine.sampling.requests import OpenRequest, Piece, Row
from turnwise.engine.sampling.tables import CopyBlock, KvTables

WORTH_WAITING = 64
"""A prompt that shares at least this many tokens with another waits one step until the other has read them."""

Beginning = tuple[int, bytes]
"""The node of a sequence's cached prefix, and the tokens after it."""


class Scheduler:
    """Rows that wait, read their prompts or run, and the KV blocks that they hold."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        copy_block: CopyBlock,
        *,
        max_num_seqs: int,
        prefill_tokens: int,
        prefix_cache: bool,
        angle_switch: int | None = None,
    ) -> None:
        """`angle_switch`: sequences of more tokens have other angles (`model/rotation.py`)."""
        self.block_size = pools[0].block_size
        self.tables = KvTables(pools, copy_block, prefill_tokens)
        self.max_num_seqs = max_num_seqs
        self.prefill_tokens = prefill_tokens
        self.prefix_cache = prefix_cache
        self.angle_switch = angle_switch
        self.waiting: deque[Row] = deque()
        self.reading: list[Row] = []
        """Admitted rows whose prompt is not completely read."""
        self.running: list[Row] = []
        """Running rows, oldest first."""
        self.num_preemptions = 0
        self.settle: Callable[[], bool] = lambda: False
        """Wait for the tokens of the launched step and add them to their rows; False if there are none."""
        self._lanes = list(range(max_num_seqs))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.reading or self.running)

    def add(self, request: OpenRequest) -> None:
        self.waiting.append(Row(request, 0, request.prompt[:]))

    def remove(self, request: OpenRequest) -> None:
        """Drop every row of a request and free its blocks."""
        for group in (self.reading, self.running):
            for row in [s for s in group if s.request is request]:
                group.remove(row)
                self._free(row)
        self.waiting = deque(s for s in self.waiting if s.request is not request)

    def next_decode(self) -> list[Row]:
        """The running rows that sample a token now, each with a place for it. They go before waiting rows."""
        if self.angle_switch is not None:
            self._switch_angles(self.angle_switch)
        size = self.block_size
        growing = [r for r in self.running if len(r.blocks) * size < len(r.tokens) + r.num_pending]
        for row in growing:
            if row in self.running:
                self._reserve_decode(row)
        decode = [row for row in self.running if not row.is_finishing]
        decode.sort(key=_policy_version)
        return decode

    def next_pieces(self) -> list[Piece]:
        """The pieces of prompts to read now; waiting rows are admitted while there is room."""
        pieces = self._pieces()
        # Every request was checked to fit an empty pool, so with nothing running the first waiting row is admitted.
        assert self.running or pieces or not self.waiting, "rows wait, but none runs and none can be admitted"
        pieces.sort(key=lambda piece: _policy_version(piece.row))
        return pieces

    def policies(self) -> set[int]:
        """The policy versions of all running and waiting rows."""
        return {s.request.policy.version for group in (self.running, self.reading, self.waiting) for s in group}

    def finish_piece(self, piece: Piece) -> list[Row]:
        """Record what a step computed; returns the rows that may now sample their next token."""
        row = piece.row
        row.num_computed = piece.stop
        self._register(row)
        if not piece.is_last:
            if piece.stop == self._num_readable(row):
                row.is_start_scored = True
                self._read_again(row)
            return []
        self.reading.remove(row)
        self.tables.end_reading(row)
        self._start_running(row)
        if not row.is_leader:
            return [row]
        forked = [self._fork(row, i) for i in range(1, row.request.asked.num_samples)]
        self.waiting.extendleft(child for child in reversed(forked) if not child.blocks)
        return [row, *(child for child in forked if child.blocks)]

    def advance(self, row: Row, token: int, logprob: float) -> None:
        """Append a sampled token; its key and value are computed by the next step."""
        row.tokens.append(token)
        row.logprobs.append(logprob)

    def finish_decode(self, rows: Iterable[Row]) -> None:
        """Record one more computed token for each row; call this before their new tokens count as pending."""
        size = self.block_size
        for row in rows:
            row.num_computed = computed = len(row.tokens) + row.num_pending
            if computed % size == 0:
                self._register(row)

    def room_ahead(self, row: Row, count: int) -> int:
        """How many tokens after the last one of a running row have a place, up to `count`; no other row gives one up.

        It takes free blocks for them, as long as every running row can get one more.
        """
        size = self.block_size
        while len(row.blocks) * size < row.length + count and self.tables.num_available > len(self.running):
            self.tables.grow(row)
        return min(count, len(row.blocks) * size - row.length)

    def retire(self, row: Row) -> None:
        """Release a complete row; its blocks stay findable for the conversation's next turn."""
        self.running.remove(row)
        self._register(row)
        self._free(row)

    def _pieces(self) -> list[Piece]:
        budget = self.prefill_tokens
        pieces: list[Piece] = []
        put_off: list[Row] = []
        beginnings = {self._beginning(row, row.prefix) for row in self.reading}
        for row in self.reading:
            budget = self._take(row, budget, pieces)
        while budget > 0 and self.waiting:
            row = self.waiting[0]
            admission = self._admit(row, beginnings)
            if admission == "no room":
                break
            self.waiting.popleft()
            if admission == "later":
                put_off.append(row)
                continue
            self.reading.append(row)
            budget = self._take(row, budget, pieces)
        self.waiting.extendleft(reversed(put_off))
        return pieces

    def _beginning(self, row: Row, prefix: Prefix) -> Beginning | None:
        """The key by which rows with the same beginning find each other; None if the prompt is about to end."""
        size = self.block_size
        start = prefix.num_blocks * size
        stop = start + max(WORTH_WAITING, size)
        if not self.prefix_cache or len(row.tokens) <= stop:
            return None
        return prefix.node, row.tokens[start:stop].tobytes()

    def _take(self, row: Row, budget: int, pieces: list[Piece]) -> int:
        stop = min(self._num_readable(row), row.num_computed + min(budget, self.tables.chunk))
        if stop > row.num_computed:
            self.tables.fill(row, stop)
            pieces.append(Piece(row, row.num_computed, stop))
        return budget - (stop - row.num_computed)

    def _admit(self, row: Row, beginnings: set[Beginning | None]) -> Literal["admitted", "later", "no room"]:
        """Find cached blocks and reserve the rest, or leave everything as it is.

        A row waits if a sibling reads the same tokens in this pass: the next pass finds them in the cache. What an
        admitted row reads is added to `beginnings`.
        """
        request = row.request
        if len(self.running) + len(self.reading) >= self.max_num_seqs:
            return "no room"
        self._choose_angles(row)
        tables = self.tables.find(row, is_cached=self.prefix_cache and not row.scores_prompt)
        beginning = self._beginning(row, tables[0].prefix)
        if beginning is not None and beginning in beginnings and not row.scores_prompt:
            self.tables.give_back(tables)
            return "later"
        # Leave one free block per running row, so that admitting a row does not preempt another at once.
        if not self.tables.reserve(row, tables, headroom=len(self.running)):
            self.tables.give_back(tables)
            return "no room"
        row.num_computed = row.prefix.num_blocks * self.block_size
        if row.is_leader:
            request.num_cached = row.num_computed
            if not row.is_start_scored:
                request.forget_scores()
        beginnings.add(beginning)
        return "admitted"

    def _is_full(self, row: Row) -> bool:
        return not row.is_finishing and len(row.blocks) * self.block_size < row.length

    def _reserve_decode(self, row: Row) -> None:
        """Make sure that the token about to be computed has a place; preempt the youngest if there is none."""
        while self._is_full(row):
            if self.tables.grow(row):
                continue
            if self.settle():  # rows that turn out to be complete give their blocks back
                if row not in self.running:
                    return
                continue
            victim = self.reading[-1] if self.reading else self.running[-1]
            self._preempt(victim)
            if victim is row:
                return

    def _preempt(self, row: Row) -> None:
        row.is_start_scored = False
        self._read_again(row)
        self.num_preemptions += 1

    def _read_again(self, row: Row) -> None:
        """Take a row's blocks; it waits, before all others, to read its tokens again."""
        (self.reading if row in self.reading else self.running).remove(row)
        self._register(row)
        self._free(row)
        self.waiting.appendleft(row)

    def _switch_angles(self, switch: int) -> None:
        """Rows that have become longer than `switch` read their tokens again, with the angles of such sequences."""
        grown = [row for row in self.running if not row.first_angle and row.length > switch and not row.is_finishing]
        for row in grown:
            if row.num_pending:
                self.settle()
            if row in self.running:
                self._read_again(row)

    def _choose_angles(self, row: Row) -> None:
        """Choose the angles of a row that is about to read its tokens."""
        if self.angle_switch is None:
            return
        scores_start = row.scores_prompt and not row.is_start_scored
        is_long = len(row.tokens) > self.angle_switch and not scores_start
        row.first_angle = self.angle_switch if is_long else 0
        row.names.clear()

    def _num_readable(self, row: Row) -> int:
        """Tokens that the row reads with its angles."""
        if self.angle_switch is None or row.first_angle:
            return len(row.tokens)
        return min(len(row.tokens), self.angle_switch)

    def _fork(self, parent: Row, index: int) -> Row:
        """Make a sibling that shares the parent's full blocks; without room it has no blocks and waits."""
        child = Row(parent.request, index, parent.tokens[:], first_angle=parent.first_angle)
        is_room = len(self.running) + len(self.reading) < self.max_num_seqs
        if is_room and self.tables.fork(parent, child):
            child.num_computed = parent.num_computed
            self._start_running(child)
        return child

    def _start_running(self, row: Row) -> None:
        row.lane = self._lanes.pop()
        self.running.append(row)

    def _register(self, row: Row) -> None:
        if self.prefix_cache:
            self.tables.register(row)

    def _free(self, row: Row) -> None:
        self.tables.free(row)
        if row.lane >= 0:
            self._lanes.append(row.lane)
            row.lane = -1
        row.num_computed = 0


def _policy_version(row: Row) -> int:
    return row.request.policy.version
