"""Logprobs as OpenAI's two endpoints show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from turnwise.envs.chat_api.bodies import refused
from turnwise.service.openai.gateway import Talker
from turnwise.service.openai.text import UNFINISHED


def check_top_logprobs(count: int, temperature: float | None, *, is_streamed: bool) -> None:
    """The engine reads the reply once more, at temperature 1, to find alternatives."""
    if count and is_streamed:
        raise refused("top_logprobs", "no alternatives while streaming; leave stream out, or ask for none")
    if count and temperature not in (None, 0, 1):
        raise refused(
            "top_logprobs",
            f"alternatives are computed at temperature 1, and this is {temperature:g}; set 1 or 0, or ask for none",
        )


def chat_logprob(
    talker: Talker, token: int, logprob: float, alternatives: Iterable[tuple[int, float]] = ()
) -> dict[str, Any]:
    others = [_entry(talker, other, value) for other, value in alternatives]
    return {**_entry(talker, token, logprob), "top_logprobs": others}


def _entry(talker: Talker, token: int, logprob: float) -> dict[str, Any]:
    text = talker.text_of([token])
    is_whole = UNFINISHED not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_whole else None}


def plain_logprobs(
    talker: Talker,
    tokens: Sequence[int],
    logprobs: Sequence[float | None],
    rows: Sequence[Sequence[tuple[int, float]] | None] | None,
) -> dict[str, Any]:
    """The four lists of `/v1/completions`. Alternatives with the same text are one entry, as in OpenAI's API."""
    texts = [talker.text_of([token]) for token in tokens]
    offsets: list[int] = []
    place = 0
    for text in texts:
        offsets.append(place)
        place += len(text)
    top = None
    if rows is not None:
        top = [None if row is None else {talker.text_of([other]): value for other, value in row} for row in rows]
    return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": top, "text_offset": offsets}
