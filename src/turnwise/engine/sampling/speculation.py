"""Which tokens to guess, and when a guess pays.

A draft is what followed the last tokens of a sequence where they stood before (`drafts.py`). One decode pass runs the
sequence and its draft, each token as a row of its own, and every row draws with the random number of its place. A
drawn token that equals the draft's makes the next row's draw count too; the first that does not ends the draft, and it
is itself the next token. So every token is the one that would have been drawn without a draft, and so is its logprob:
nothing is lost, and no other distribution is ever sampled from.

A row more costs a pass some time. The costs are measured, and so is how often a place that agreed in the last 2, 4, 8,
.. tokens told the next one; that is counted for every token, drafted or not. A token is drafted where it is likely
enough for its cost: almost always beside few rows, hardly ever beside many.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.engine.sampling.drafts import Match, SuffixIndex, Text
from turnwise.engine.sampling.requests import OpenRequest, Row

MOST_DRAFTED = 16
"""Most tokens of one draft."""
MOST_AHEAD = 64
"""Most tokens of all drafts in one pass."""
MOST_ROWS = 32
"""Beside more sequences a guess is never worth its place: on an H200, guesses beside 256 halved the speed, although
99 % of them were right."""
MARGIN, LEAST_GAIN = 1.15, 1.02
"""A guessed token should gain this much more than it costs, and all of them make a pass this much faster, by what is
known."""
BEST_SHARE = 0.9
"""If a row's own cost is more than this share of a pass's time per row, hardly any guess is sure enough."""
LEAST_PASS_S = 4e-3
"""To look costs the host as much as a guess can win, if a pass on a CPU is shorter: a model for tests."""
MOST_IDLE, MOST_REST = 4, 64
"""After this many passes without a draft, this many more pass without a look, in the end."""
PASSES_PER_PLAIN = 24
"""One pass in this number looks for no draft, to measure what looking costs."""
_RATE_MEMORY, _COST_MEMORY, _TRUST_MEMORY = 0.995, 0.98, 0.98
_ROW_PRIOR, _DRAFT_PRIOR = 64.0, 2.0
"""How much is believed of the costs before they are measured."""
_PASSES_PER_ESTIMATE = 8
_LONGEST_PASS = 3.0
"""A pass that takes longer, compared with what is expected, counts as one that took this much."""


class HitRates:
    """How often the token after a match is the next one, by the number of tokens that agree: 2, 4, 8, .."""

    def __init__(self) -> None:
        self._hits = [0.5] * 7  # little is believed of a place before it has told something
        self._trials = [2.0] * 7

    def add(self, length: int, *, is_right: bool) -> None:
        kind = min(length, 63).bit_length()
        self._hits[kind] = self._hits[kind] * _RATE_MEMORY + is_right
        self._trials[kind] = self._trials[kind] * _RATE_MEMORY + 1

    def of(self, length: int) -> float:
        kind = min(length, 63).bit_length()
        return self._hits[kind] / self._trials[kind]


class Trust:
    """How many of the drafted tokens were right, compared with how many should have been: at most 1."""

    def __init__(self) -> None:
        self._expected = self._right = 4.0

    @property
    def factor(self) -> float:
        return min(1.0, self._right / self._expected)

    def add(self, expected: float, num_right: int) -> None:
        self._expected = self._expected * _TRUST_MEMORY + expected
        self._right = self._right * _TRUST_MEMORY + num_right

    def recover(self) -> None:
        """Nothing was drafted: after some time, try again."""
        self._right += (self._expected - self._right) * (1 - _TRUST_MEMORY)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a decode pass: `base` + `row` for each of its rows, + `draft` if drafts were looked for."""

    base: float
    row: float
    draft: float

    def seconds(self, num_rows: int, *, has_drafts: bool) -> float:
        return self.base + self.row * num_rows + self.draft * has_drafts


class PassCosts:
    """The costs of passes, from how long they took; old ones count less and less.

    Least squares over (1, rows, has drafts), and what is believed before: a row costs `row` times the base, and drafts
    cost `draft` times the base.
    """

    def __init__(self, *, row: float, draft: float) -> None:
        beliefs = (_ROW_PRIOR, np.array([row, -1.0, 0.0])), (_DRAFT_PRIOR, np.array([draft, 0.0, -1.0]))
        self._prior = sum((weight * np.outer(one, one) for weight, one in beliefs), np.zeros((3, 3)))
        self._least_row = row / 10
        self._num_passes = 0
        self._sums = [0.0] * 8
        """Passes, rows, drafts, rows^2, rows of passes with drafts, seconds, seconds * rows, seconds with drafts."""
        self.now: Costs | None = None
        """None before some passes were timed."""

    def add(self, num_rows: int, *, has_drafts: bool, seconds: float) -> None:
        if self.now is not None:
            seconds = min(seconds, _LONGEST_PASS * self.now.seconds(num_rows, has_drafts=has_drafts))
        new = (1.0, num_rows, has_drafts, num_rows**2, num_rows * has_drafts)
        new += (seconds, seconds * num_rows, seconds * has_drafts)
        self._sums = [old * _COST_MEMORY + one for old, one in zip(self._sums, new, strict=True)]
        self._num_passes += 1
        if self._num_passes % _PASSES_PER_ESTIMATE == 0:
            self.now = self._estimate()

    def _estimate(self) -> Costs:
        count, rows, drafts, squares, drafted, *seconds = self._sums
        products = np.array([[count, rows, drafts], [rows, squares, drafted], [drafts, drafted, drafts]])
        base, row, draft = np.linalg.solve(products + self._prior, np.array(seconds)).tolist()
        base = max(base, 1e-9)
        return Costs(base, max(row, self._least_row * base), max(draft, 0.0))


@dataclass(eq=False, slots=True)
class _Followed:
    """A running row: its text in the index, and the place after which its next tokens are guessed."""

    text: Text
    match: Match | None
    num_seen: int
    """Tokens of the row that are compared with the match."""


@dataclass(frozen=True, slots=True)
class _Plan:
    row: Row
    match: Match
    chances: list[float]
    """For each token of the draft, how likely it is that it and all before it are right."""

    def cut(self, least: float, most: int) -> _Plan:
        """The plan as far as its tokens are likely enough."""
        count = sum(chance >= least for chance in self.chances)
        return _Plan(self.row, self.match, self.chances[: min(count, most)])

    def guesses(self) -> list[int]:
        """The draft. It ends before a token that ends the row: nothing is drawn after that one."""
        found = continuation(self.match, self.row.tokens, len(self.chances))
        stop_ids = self.row.request.stop_ids
        return list(itertools.takewhile(lambda token: token not in stop_ids, found))


class Speculation:
    """The drafts of one sampler's rows."""

    def __init__(self, *, is_async: bool, most_tokens: int | None = None) -> None:
        """`most_tokens`: a row that is shorter must not become longer within a draft.

        Where the device runs ahead of the host, a pass with drafts waits for the host.
        """
        self.index = SuffixIndex()
        self.rates = HitRates()
        self.costs = PassCosts(row=0.01, draft=0.5) if is_async else PassCosts(row=0.08, draft=0.0)
        self._most_tokens = most_tokens
        self._least_pass_s = 0.0 if is_async else LEAST_PASS_S
        self._followed: dict[Row, _Followed] = {}
        self._num_idle, self._rest, self._next_rest = 0, 0, 1
        self._num_looks = 0
        self._num_resting = 0
        """Number of rows when speculation began to rest."""
        self.most_idle = MOST_IDLE
        self._expected = 0.0
        self.trust = Trust()
        self.has_looked = False
        """Whether the last plan looked at the rows."""

    @property
    def num_followed(self) -> int:
        """Running rows that it keeps something of: 0 when nothing runs, or memory is lost."""
        return len(self._followed)

    def plan(self, rows: Sequence[Row]) -> list[tuple[Row, list[int]]]:
        """The rows to draft for, and their drafts; rows with pending tokens are looked at as far as they are known."""
        costs, self.has_looked, self._expected = self.costs.now, False, 0.0
        if (
            not 0 < len(rows) <= MOST_ROWS
            or costs is None
            or self._is_short
            or costs.row * len(rows) > BEST_SHARE * costs.seconds(len(rows), has_drafts=False)
        ):
            return []
        if 4 * len(rows) <= 3 * self._num_resting:  # a guess beside fewer rows pays sooner
            self._rest, self._next_rest, self._num_resting = 0, 1, 0
        if self._rest:
            self._rest -= 1
            return []
        self.has_looked = True
        plans = self._best([plan for row in rows if (plan := self._look(row)) is not None], len(rows), costs)
        self._expected = sum(sum(plan.chances) for plan in plans)
        self._pause(len(rows), has_drafts=bool(plans))
        return [(plan.row, guesses) for plan in plans if (guesses := plan.guesses())]

    def _pause(self, num_rows: int, *, has_drafts: bool) -> None:
        """Decide how many passes go by without a look."""
        self._num_looks += 1
        self._num_idle = 0 if has_drafts else self._num_idle + 1
        if has_drafts:
            self._next_rest = 1
        else:
            self.trust.recover()
        if self._num_idle == self.most_idle:
            self._rest, self._num_idle, self._num_resting = self._next_rest, 0, num_rows
            self._next_rest = min(2 * self._next_rest, MOST_REST)
        elif self._num_looks % PASSES_PER_PLAIN == 0:
            self._rest = 1

    def checked(self, num_right: int) -> None:
        """So many tokens of the last plan were right."""
        self.trust.add(self._expected, num_right)

    @property
    def _is_short(self) -> bool:
        costs = self.costs.now
        return costs is not None and costs.seconds(1, has_drafts=False) < self._least_pass_s

    def finish(self, row: Row) -> None:
        """Keep a complete reply to guess others from."""
        followed = self._followed.pop(row, None)
        if self._is_short:
            if followed is not None:
                self.index.drop(followed.text)
            return
        self.index.finish(followed.text if followed else self.index.begin(row.tokens, len(row.request.prompt)))

    def forget(self, request: OpenRequest) -> None:
        """Drop the rows of a request that was given up."""
        for row in [row for row in self._followed if row.request is request]:
            self.index.drop(self._followed.pop(row).text)

    def _best(self, plans: list[_Plan], num_rows: int, costs: Costs) -> list[_Plan]:
        """The tokens that make a pass sample most per second; none if all of them are not worth their cost."""
        before = num_rows / costs.seconds(num_rows, has_drafts=False)
        plans = [plan.cut(MARGIN * costs.row * before, MOST_DRAFTED) for plan in plans]
        num_drafted = sum(len(plan.chances) for plan in plans)
        if not num_drafted:
            return []
        num_sampled = num_rows + sum(sum(plan.chances) for plan in plans)
        after = num_sampled / costs.seconds(num_rows + num_drafted, has_drafts=True)
        if after < LEAST_GAIN * before:
            return []
        least, room = costs.row * after, MOST_AHEAD
        chosen: list[_Plan] = []
        for plan in sorted(plans, key=lambda plan: -sum(plan.chances)):
            cut = plan.cut(least, room)
            room -= len(cut.chances)
            if cut.chances:
                chosen.append(cut)
        return chosen

    def _look(self, row: Row) -> _Plan | None:
        """What could be guessed for a row."""
        match = self._follow(row)
        if match is None:
            return None
        request, tokens = row.request, row.tokens
        most = min(MOST_DRAFTED, request.max_tokens - row.num_sampled - 1)
        if match.text.tokens is not tokens:
            most = min(most, match.text.length - match.position)
        if self._most_tokens is not None and not row.first_angle:
            most = min(most, self._most_tokens - len(tokens))
        chances: list[float] = []
        chance = self.trust.factor
        for length in range(match.length, match.length + most):
            chance *= self.rates.of(length)
            chances.append(chance)
        return _Plan(row, match, chances) if chances else None

    def _follow(self, row: Row) -> Match | None:
        """The place of a row's likely next tokens, after its newest tokens were compared with the last guess."""
        followed, tokens = self._followed.get(row), row.tokens
        if followed is None:
            self.index.add_prompt(row.request.prompt)
            text = self.index.begin(tokens, len(row.request.prompt))
            followed = self._followed[row] = _Followed(text, self.index.find(tokens), len(tokens))
        elif followed.num_seen < len(tokens):
            match = self._compare(followed, tokens)
            self.index.grow(followed.text)
            followed.match = match or self.index.find(tokens)
        return followed.match

    def _compare(self, followed: _Followed, tokens: array[int]) -> Match | None:
        """The match after new tokens; None if one of them was another, or if its text ends there."""
        match, seen = followed.match, followed.num_seen
        followed.num_seen = len(tokens)
        if match is None:
            return None
        text = match.text
        for token in tokens[seen:]:
            if match.position >= text.length:
                return None
            is_right = text.tokens[match.position - text.offset] == token
            self.rates.add(match.length, is_right=is_right)
            if not is_right:
                return None
            match.position += 1
            match.length += 1
        return match if match.position < text.length else None


def continuation(match: Match, tokens: array[int], count: int) -> list[int]:
    """`count` tokens after a match. If the match is in the sequence itself, the repetition goes on."""
    text = match.text
    first = match.position - text.offset
    found = text.tokens[first : first + count].tolist()
    if text.tokens is tokens:
        period = len(tokens) - first
        while len(found) < count:
            found.append(found[len(found) - period])
    return found
