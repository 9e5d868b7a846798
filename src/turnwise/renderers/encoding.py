"""Turns text into ids and back, and keeps ordinary text apart from control tokens.

What an env, a tool or a user writes is text: `<|im_end|>` in it becomes about eight ordinary tokens, never the id that
ends a turn. Only the chat format writes control tokens. If the vocabulary has no token for a byte, the byte is lost, as
in the tokenizer itself (SmolLM2 has none for a few control characters and for 0xF1 and up).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

from turnwise.envs.tools import parse_tool_calls
from turnwise.errors import ConfigError, DataError
from turnwise.trajectory import Message

THINKING_END = "</think>"


class TextEncoding:
    """A tokenizer's text encoding. It works on a copy, so that nobody else can change its settings."""

    def __init__(self, tokenizer: Any) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError(
                f"{type(tokenizer).__name__} is not a fast tokenizer; token-exact rendering needs one: "
                "load it with AutoTokenizer.from_pretrained from a directory that has a tokenizer.json"
            )
        self._text = copy.deepcopy(backend)
        self._text.encode_special_tokens = True  # the library's name for "special tokens are ordinary text"
        self._marked = copy.deepcopy(backend)
        self._marked.encode_special_tokens = False
        special = {id_: token.content for id_, token in backend.get_added_tokens_decoder().items() if token.special}
        self.control_ids: dict[str, int] = {content: id_ for id_, content in special.items()}
        """The ids of control tokens, by their text."""
        self._control_pattern = _any_of(self.control_ids)

    def control_id(self, token: str) -> int:
        """The id of a control token by its text."""
        if token not in self.control_ids:
            known = ", ".join(self.control_ids) or "none"
            raise ConfigError(f"the tokenizer has no special token {token!r}; its special tokens: {known}")
        return self.control_ids[token]

    def text_to_ids(self, text: str) -> list[int]:
        """Encode text in which nothing is a control token."""
        try:
            return self._text.encode(text, add_special_tokens=False).ids
        except (UnicodeError, TypeError) as cause:
            raise DataError(f"text that cannot be encoded: {text[:80]!r} ({cause})") from cause

    def marked_to_ids(self, text: str) -> list[int]:
        """Encode the output of a template, in which control tokens become their ids."""
        return self._marked.encode(text, add_special_tokens=False).ids

    def ids_to_text(self, ids: Sequence[int]) -> str:
        """Decode every id. Control tokens become their text; bytes that are not UTF-8 become U+FFFD."""
        return self._marked.decode(list(ids), skip_special_tokens=False)

    def ids_to_reply(self, sampled_ids: Sequence[int], stop_ids: Sequence[int]) -> Message:
        """The assistant's message. Its content is the whole text but a stop at the end; `tool_calls` are its calls."""
        is_stopped = bool(sampled_ids) and sampled_ids[-1] in stop_ids
        text = self.ids_to_text(sampled_ids[:-1] if is_stopped else sampled_ids)
        return Message(role="assistant", content=text, tool_calls=parse_tool_calls(text).calls)

    def split_at_control(self, text: str) -> list[str]:
        """Split into text (maybe empty) and control tokens, in turn."""
        return self._control_pattern.split(text) if self.control_ids else [text]


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("(" + "|".join(re.escape(string) for string in longest_first) + ")")


def stop_ids_of(tokenizer: Any, end_id: int) -> tuple[int, ...]:
    """The format's end of turn, then the tokenizer's end of sequence if that is another id."""
    eos_id = tokenizer.eos_token_id
    return (end_id,) if eos_id is None or eos_id == end_id else (end_id, int(eos_id))


def has_thinking(text: str) -> bool:
    return THINKING_END in text


def without_thinking(text: str) -> str:
    """The text after the last `</think>`, which is what Qwen3's template keeps of an earlier reply."""
    return text.rpartition(THINKING_END)[2].lstrip("\n") if has_thinking(text) else text


def reply_text(reply: Message) -> str:
    """The text that the model must say so that `ids_to_reply` gives this message."""
    if reply.role != "assistant":
        raise DataError(f"a message of {reply.role}; only an assistant's message is a reply")
    if reply.tool_calls and not parse_tool_calls(reply.content).calls:
        raise DataError(
            "a reply with tool_calls that its content does not hold; write them out with "
            "turnwise.envs.tools.format_tool_call"
        )
    return reply.content
