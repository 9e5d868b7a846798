r"""ChatML, the chat format of `tiny`, SmolLM2 and Qwen2.

    <|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n     4<|im_end|>
    ---------------------------- prompt --------------------------------- --sampled--

`role\ncontent` is encoded in one piece, as the template does, because a tokenizer may join the two; the control tokens
around it are put in as ids. Roles are system, user, assistant and tool; a tool's name is not shown.

If a conversation has no system message, SmolLM2's and Qwen2's templates add their own. This renderer adds the same one,
which it reads from the tokenizer's template. A world that does not want it starts with a system message. The
constructor compares this renderer with the tokenizer's template on test conversations, if the tokenizer has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.errors import ConfigError, DataError
from turnwise.renderers.base import Extension
from turnwise.renderers.encoding import (
    TextEncoding,
    has_thinking,
    reply_text,
    stop_ids_of,
    without_thinking,
)
from turnwise.trajectory import Message

START_TOKEN, END_TOKEN = "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")

_USER = Message(role="user", content="  What is 2+2?\nSay it in one word, bitte: für Ælfred 😀.\n\n")
_SYSTEM = Message(role="system", content="You add.\n")
_ASSISTANT = Message(role="assistant", content="\n4 ")
_TOOL = Message(role="tool", content='{"result": 4}', name="add")
PROBES: tuple[tuple[Message, ...], ...] = (
    (_USER,),
    (_SYSTEM, _USER),
    (_USER, _ASSISTANT, _USER),
    (_SYSTEM, _USER, _ASSISTANT, _TOOL, _ASSISTANT, _USER),
)
THINKING_PROBE = (_USER, Message(role="assistant", content="<think>\nEasy.\n</think>\n\n4"), _USER)


class ChatML:
    """The renderer of ChatML tokenizers.

    With `strip_thinking`, earlier replies lose the text before `</think>`, as in Qwen3's format. The prompt after such
    a reply is rendered again as a whole.
    """

    def __init__(self, tokenizer: Any, *, strip_thinking: bool = False) -> None:
        self._encoding = TextEncoding(tokenizer)
        self._start_id = self._encoding.control_id(START_TOKEN)
        self._end_id = self._encoding.control_id(END_TOKEN)
        self._newline_ids = self._encoding.text_to_ids("\n")
        self._opening_ids = [self._start_id, *self._encoding.text_to_ids("assistant\n")]
        self._stop_ids = stop_ids_of(tokenizer, self._end_id)
        self._strips_thinking = strip_thinking
        self.default_system: str | None = None
        """The system message that the tokenizer's template adds if there is none."""
        if tokenizer.chat_template is not None:
            self.default_system = _default_system(tokenizer)
            self._check_against(tokenizer)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self._stop_ids

    def start(self, messages: Sequence[Message]) -> list[int]:
        if not messages:
            raise DataError("no messages; a conversation starts with at least one")
        if self.default_system is not None and messages[0].role != "system":
            messages = [Message(role="system", content=self.default_system), *messages]
        return [*self._messages_to_ids(messages), *self._opening_ids]

    def extend(
        self,
        prompt_ids: Sequence[int],
        sampled_ids: Sequence[int],
        observation: Sequence[Message],
        *,
        history: Sequence[Message] = (),
    ) -> Extension:
        """Add a missing end of turn after the reply. It counts as observed, because the model did not sample it."""
        if self._strips_thinking:
            reply = self.parse(sampled_ids)
            if has_thinking(reply.content):
                if not history:
                    raise DataError("a reply with thinking to strip, and no history to render the prompt anew from")
                return Extension(self.start([*history, reply, *observation]), is_append_only=False)
        closing = [] if sampled_ids and sampled_ids[-1] == self._end_id else [self._end_id]
        between = [*closing, *self._newline_ids, *self._messages_to_ids(observation), *self._opening_ids]
        return Extension([*prompt_ids, *sampled_ids, *between], is_append_only=True)

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        return self._encoding.ids_to_reply(sampled_ids, self._stop_ids)

    def encode_reply(self, reply: Message) -> list[int]:
        return [*self._encoding.text_to_ids(reply_text(reply)), self._end_id]

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text, in which nothing is a control token."""
        return self._encoding.text_to_ids(text)

    def _messages_to_ids(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for message in messages:
            if message.role not in ROLES:
                raise DataError(f"a message of role {message.role!r}; expected {', '.join(ROLES)}")
            is_stripped = self._strips_thinking and message.role == "assistant"
            content = without_thinking(message.content) if is_stripped else message.content
            body_ids = self._encoding.text_to_ids(f"{message.role}\n{content}")
            ids += [self._start_id, *body_ids, self._end_id, *self._newline_ids]
        return ids

    def _check_against(self, tokenizer: Any) -> None:
        for probe in PROBES if self._strips_thinking else (*PROBES, THINKING_PROBE):
            expected = self._encoding.marked_to_ids(_template_text(tokenizer, probe))
            ids = self.start(probe)
            if ids != expected:
                at = next(
                    (i for i, (a, b) in enumerate(zip(ids, expected, strict=False)) if a != b),
                    min(len(ids), len(expected)),
                )
                raise ConfigError(
                    "the tokenizer's chat template is not plain ChatML: after "
                    f"{self._encoding.ids_to_text(expected[:at])[-60:]!r} it has "
                    f"{self._encoding.ids_to_text(expected[at : at + 12])!r}, ChatML has "
                    f"{self._encoding.ids_to_text(ids[at : at + 12])!r}; use the renderer 'template'"
                )


def _default_system(tokenizer: Any) -> str | None:
    """The system message that the template adds before a first user message. None if it adds none."""
    text = _template_text(tokenizer, (Message(role="user", content="hello"),))
    opening = f"{START_TOKEN}system\n"
    before = text.partition(f"{END_TOKEN}\n{START_TOKEN}user\n")[0]
    return before.removeprefix(opening) if before.startswith(opening) else None


def _template_text(tokenizer: Any, messages: Sequence[Message]) -> str:
    import jinja2

    plain = [{"role": message.role, "content": message.content} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True))
    except jinja2.TemplateError as cause:
        roles = ", ".join(message.role for message in messages)
        raise ConfigError(
            f"the tokenizer's chat template is not plain ChatML: it refuses {roles} ({cause}); "
            "use the renderer 'template'"
        ) from cause
