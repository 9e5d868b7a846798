"""Text to ids and back, with the line between text and control tokens drawn by the caller.

What an env, a tool or a user writes is text: `<|im_end|>` in it is eight or so ordinary tokens, never the one id that
ends a turn. Only the format itself writes control tokens. A vocabulary without a token for some byte loses it, as the
tokenizer itself does (SmolLM2 has none for a few control characters and for 0xF1 and up).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from typing import Any

from turnwise.errors import ConfigError, DataError


class TextEncoding:
    """A tokenizer's text encoding, on a copy of its own: nobody else's settings reach it."""

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
        """Control tokens by their text."""
        self._control_pattern = _any_of(self.control_ids)

    def control_id(self, token: str) -> int:
        """The id of a control token by its text."""
        if token not in self.control_ids:
            known = ", ".join(self.control_ids) or "none"
            raise ConfigError(f"the tokenizer has no special token {token!r}; its special tokens: {known}")
        return self.control_ids[token]

    def has_control_text(self, text: str) -> bool:
        return bool(self.control_ids) and self._control_pattern.search(text) is not None

    def text_to_ids(self, text: str) -> list[int]:
        """Encode text in which nothing is a control token."""
        try:
            return self._text.encode(text, add_special_tokens=False).ids
        except (UnicodeError, TypeError) as cause:
            raise DataError(f"text that cannot be encoded: {text[:80]!r} ({cause})") from cause

    def marked_to_ids(self, text: str) -> list[int]:
        """Encode a rendered template, in which control tokens are meant."""
        return self._marked.encode(text, add_special_tokens=False).ids

    def ids_to_text(self, ids: Sequence[int]) -> str:
        """Decode every id, control tokens as their text; bytes that are not UTF-8 become U+FFFD."""
        return self._marked.decode(list(ids), skip_special_tokens=False)

    def split_at_control(self, text: str) -> list[str]:
        """Alternately text (maybe empty) and control token."""
        return self._control_pattern.split(text) if self.control_ids else [text]


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("(" + "|".join(re.escape(string) for string in longest_first) + ")")


def stop_ids_of(tokenizer: Any, end_id: int) -> tuple[int, ...]:
    """The format's end of turn, then the tokenizer's end of sequence where that is another id."""
    eos_id = tokenizer.eos_token_id
    return (end_id,) if eos_id is None or eos_id == end_id else (end_id, int(eos_id))
