"""Chooses the renderer of a tokenizer."""

from __future__ import annotations

from typing import Any, Literal, get_args

from turnwise.errors import ConfigError
from turnwise.renderers.base import Renderer
from turnwise.renderers.chatml import ChatML
from turnwise.renderers.single_message import SingleMessage
from turnwise.renderers.template import TemplateRenderer
from turnwise.runtime.suggest import did_you_mean

RendererName = Literal["auto", "chatml", "template"]


def get_renderer(
    tokenizer: Any, *, multi_turn: bool = True, name: RendererName | str = "auto", strip_thinking: bool = False
) -> Renderer:
    """Make the renderer for `tokenizer`. `auto` uses ChatML if the tokenizer's template is ChatML, else the template.

    Args:
        multi_turn: Write one message per turn. False keeps all turns in one assistant message.
        strip_thinking: Remove the thinking from earlier replies, as in Qwen3's format. For ChatML only.
    """
    inner = _get_inner(tokenizer, name, strip_thinking)
    if multi_turn:
        return inner
    if strip_thinking:
        raise ConfigError("strip_thinking is not read with multi_turn=False: there are no earlier replies to strip")
    return SingleMessage(inner)


def _get_inner(tokenizer: Any, name: str, strip_thinking: bool) -> ChatML | TemplateRenderer:
    names = get_args(RendererName)
    if name not in names:
        hint = did_you_mean(name, names, cutoff=0.6)
        raise ConfigError(f"no renderer is called {name!r}{hint} (there are {', '.join(names)})")
    if name == "chatml" or strip_thinking:
        if name == "template":
            raise ConfigError("strip_thinking is for ChatML; with 'template', the tokenizer's template decides")
        return ChatML(tokenizer, strip_thinking=strip_thinking)
    if name == "template":
        return TemplateRenderer(tokenizer)
    try:
        return ChatML(tokenizer)
    except ConfigError:
        if tokenizer.chat_template is None:
            raise
        return TemplateRenderer(tokenizer)
