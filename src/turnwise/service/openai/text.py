"""Turns sampled ids into text: at once, token by token, and cut where a stop string begins."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from turnwise.envs.chat_api.messages import Reply, read_reply
from turnwise.envs.tools import parse_tool_calls

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"
"""What a tokenizer returns for an incomplete character."""
CALL_START = "<tool_call>"


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


class TokenTexts:
    """The text that each new token adds. A character of several tokens comes with the last of them."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0
        """Decoding begins at this token, because a token's text may depend on the token before it."""
        self._told = 0
        """Number of tokens whose text was returned."""

    def add(self, token: int) -> str:
        self._ids.append(token)
        return self._new(is_last=False)

    def finish(self) -> str:
        """The text that was held back, even if it is incomplete."""
        return self._new(is_last=True)

    def _new(self, *, is_last: bool) -> str:
        before = self._decode(self._ids[self._start : self._told])
        now = self._decode(self._ids[self._start :])
        if not is_last and now.endswith(UNFINISHED):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return now[len(before) :]


class ReplyStream:
    """The visible text of one reply while it is sampled. It leaves out stop strings, tool calls, and text that may
    become one of them.

    A reply that is not streamed goes through here too, so that both ways show the same.
    """

    def __init__(self, decode: Decode, stop_ids: Sequence[int], stops: Sequence[str], *, has_tools: bool) -> None:
        self._texts = TokenTexts(decode)
        self._stop_ids = frozenset(stop_ids)
        self._stops = tuple(stops)
        self._has_tools = has_tools
        self._text = ""
        self._starts: list[int] = []
        """For each token except the stop: where its text begins."""
        self._num_told = 0
        self._is_cut = False

    @property
    def num_told_tokens(self) -> int:
        """Tokens that belong to what was shown so far."""
        return bisect.bisect_left(self._starts, self._num_told)

    def add(self, token: int) -> str:
        """Add a token, and return the text that can be shown now."""
        if self._is_cut or token in self._stop_ids:
            return ""
        self._starts.append(len(self._text))
        self._text += self._texts.add(token)
        return self._show()

    def finish(self) -> tuple[str, Reply]:
        """The rest of the visible text, and the whole reply. After this, all tokens before a stop count as shown."""
        if not self._is_cut:
            self._text += self._texts.finish()
        seen = cut_at_stop(self._text, self._stops)
        reply = read_reply(seen, has_tools=self._has_tools)
        rest = seen[self._num_told :]
        self._num_told = len(seen)
        return parse_tool_calls(rest).content if reply.calls else rest, reply

    def _show(self) -> str:
        seen = cut_at_stop(self._text, self._stops)
        self._is_cut = len(seen) < len(self._text)
        end = len(seen)
        if self._has_tools and (place := seen.find(CALL_START)) >= 0:
            end = place
        elif not self._is_cut:
            watched = (*self._stops, *((CALL_START,) if self._has_tools else ()))
            end -= max((_overlap(seen, mark) for mark in watched), default=0)
        shown = seen[self._num_told : end]
        self._num_told = max(self._num_told, end)
        return shown


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` are the beginning of `mark`."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)
