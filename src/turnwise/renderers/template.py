"""The renderer of any tokenizer with a chat template.

The template writes the first prompt. After a reply, the next ids are found by difference: the template renders a fixed
base conversation with the observation at its end, and what it writes after the base's reply is what it writes after any
reply. So the sampled ids stay as they are. (A template may trim white space from earlier replies; here it stays as it
was sampled.)

Some templates rewrite earlier messages: they drop thinking from earlier replies, or open a reply with words that they
leave out later. The constructor detects this with test conversations. Such prompts are rendered again as a whole, with
`is_append_only=False`. A template that only drops thinking still appends after replies without thinking.

The template gets role, content and a tool's name. It does not get a reply's tool calls, which are part of its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import ConfigError, DataError
from turnwise.renderers.base import Extension
from turnwise.renderers.encoding import TextEncoding, has_thinking, reply_text, stop_ids_of
from turnwise.trajectory import Message

_QUESTION = Message(role="user", content="What is 2+2?")
_AGAIN = Message(role="user", content="And 3+3?")
_BASE_REPLY = "The reply of the base conversation."
_PLAIN, _THOUGHTFUL = "It is 4.", "<think>\nEasy.\n</think>\n\nIt is 4."
_THINKING_TOKENS = ("<think>", "</think>")
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A template's output. Text that only looks like a control token is replaced by its number between two `mark`s."""

    text: str
    mark: str
    has_marks: bool


class TemplateRenderer:
    """Renders with the tokenizer's own chat template.

    Args:
        template_kwargs: Arguments for the template, such as `{"enable_thinking": False}`.
    """

    def __init__(self, tokenizer: Any, *, template_kwargs: Mapping[str, object] | None = None) -> None:
        if tokenizer.chat_template is None:
            raise ConfigError("the tokenizer has no chat template; set tokenizer.chat_template, or use 'chatml'")
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._encoding = TextEncoding(tokenizer)
        self._controls = list(self._encoding.control_ids)
        probe = self._render([_QUESTION, Message(role="assistant", content=_PLAIN), _AGAIN]).text
        self._pieces_agree = self._pieces_to_ids(probe, "") == self._encoding.marked_to_ids(probe)
        self._end_token = self._find_end_token()
        self._stop_ids = self._find_stop_ids()
        self._keeps_plain = self._end_token is not None and self._keeps(_PLAIN)
        self._keeps_thinking = self._keeps_plain and self._keeps(_THOUGHTFUL)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    def start(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise DataError("no messages; a conversation starts with at least one")
        ids = self._to_ids(self._render(messages))
        if not ids:
            raise DataError("the chat template rendered these messages to nothing")
        return ids

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        observation: Sequence[Message],
        *,
        history: Sequence[Message] = (),
    ) -> Extension:
        """Add a missing end of turn after the reply. It counts as observed, because the model did not sample it."""
        reply = self.parse(sampled_ids)
        if self._is_rewritten(history, reply, observation):
            if not history:
                raise DataError("this chat template rewrites earlier turns, and there is no history to render from")
            return Extension(self.start([*history, reply, *observation]), is_append_only=False)
        after = self._ids_after_reply(observation)
        if sampled_ids and sampled_ids[-1] == after[0]:
            after = after[1:]
        return Extension([*prompt_ids, *sampled_ids, *after], is_append_only=True)

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        return self._encoding.ids_to_reply(sampled_ids, self._stop_ids)

    def encode_reply(self, reply: Message) -> list[int]:
        mark = _unused_character([reply])
        text = self._escape(Message(role="assistant", content=reply_text(reply)), mark)
        return [*self._to_ids(_Rendered(text, mark, mark in text)), self._stop_ids[0]]

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text, in which nothing is a control token."""
        return self._encoding.text_to_ids(text)

    def _is_rewritten(self, history: Sequence[Message], reply: Message, observation: Sequence[Message]) -> bool:
        if not self._keeps_plain or self._keeps_thinking:
            return not self._keeps_plain
        said = [message.content for message in [*history, reply] if message.role == "assistant"]
        if not any(has_thinking(content) for content in said):
            return False
        if not history:
            return True
        before = self._render(history).text + reply.content
        return not self._render([*history, reply, *observation]).text.startswith(before)

    def _ids_after_reply(self, observation: Sequence[Message]) -> list[int]:
        """The ids of the end of turn and of everything after it, up to the next reply."""
        base = [_QUESTION, Message(role="assistant", content=_BASE_REPLY)]
        rendered = self._render([*base, *observation])
        # The observation may quote the base's reply; the template wrote the reply before it.
        after = rendered.text.partition(_BASE_REPLY)[2].lstrip()
        assert self._end_token is not None
        if not after.startswith(self._end_token):
            raise DataError("the chat template ends a reply in another way after these messages")
        return self._to_ids(_Rendered(after, rendered.mark, rendered.mark in after))

    def _render(self, messages: Sequence[Message]) -> _Rendered:
        import jinja2

        mark = _unused_character(messages)
        plain: list[dict[str, str]] = []
        for message in messages:
            entry = {"role": message.role, "content": self._escape(message, mark)}
            plain.append({**entry, "name": message.name} if message.name else entry)
        try:
            text = self._tokenizer.apply_chat_template(
                plain, tokenize=False, add_generation_prompt=True, **self._kwargs
            )
        except jinja2.TemplateError as cause:
            roles = ", ".join(message.role for message in messages)
            raise DataError(f"the chat template refuses messages of {roles}: {cause}") from cause
        return _Rendered(text, mark, mark in text)

    def _escape(self, message: Message, mark: str) -> str:
        """Hide control tokens in a message's text. Thinking tokens in a reply were sampled, so they stay."""
        is_reply = message.role == "assistant"
        content = message.content
        for number, control in enumerate(self._controls):
            if not (is_reply and control in _THINKING_TOKENS):
                content = content.replace(control, f"{mark}{number}{mark}")
        return content

    def _to_ids(self, rendered: _Rendered) -> list[int]:
        if not rendered.has_marks:
            return self._encoding.marked_to_ids(rendered.text)
        if not self._pieces_agree:
            raise DataError(
                "a message holds text that looks like a control token, and this tokenizer cannot encode it as text: "
                "its control tokens take in the white space around them"
            )
        return self._pieces_to_ids(rendered.text, rendered.mark)

    def _pieces_to_ids(self, text: str, mark: str) -> list[int]:
        ids: list[int] = []
        for index, piece in enumerate(self._encoding.split_at_control(text)):
            if index % 2:
                ids.append(self._encoding.control_ids[piece])
            elif piece:
                ids += self._encoding.text_to_ids(self._unescape(piece, mark) if mark else piece)
        return ids

    def _unescape(self, text: str, mark: str) -> str:
        return re.sub(f"{mark}([0-9]+){mark}", lambda match: self._controls[int(match[1])], text)

    def _find_end_token(self) -> str | None:
        """The control token that the template writes after a reply. None if it ends a reply in another way."""
        base = [_QUESTION, Message(role="assistant", content=_BASE_REPLY), _AGAIN]
        after = self._render(base).text.partition(_BASE_REPLY)[2]
        before, *rest = self._encoding.split_at_control(after)
        return rest[0] if rest and not before.strip() else None

    def _find_stop_ids(self) -> tuple[int, ...]:
        if self._end_token is not None:
            return stop_ids_of(self._tokenizer, self._encoding.control_ids[self._end_token])
        if self._tokenizer.eos_token_id is None:
            raise ConfigError("the chat template ends replies with no special token, and the tokenizer has no eos")
        return (int(self._tokenizer.eos_token_id),)

    def _keeps(self, reply: str) -> bool:
        """Whether the next prompt holds this reply unchanged."""
        before = self._render([_QUESTION]).text + reply
        after = self._render([_QUESTION, Message(role="assistant", content=reply), _AGAIN]).text
        return after.startswith(before) and after[len(before) :].lstrip().startswith(self._end_token or "")


def _unused_character(messages: Sequence[Message]) -> str:
    used = {character for message in messages for character in message.content if ord(character) >= _PRIVATE_USE.start}
    return next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)
