"""One reply of an SGLang server, in as many requests as the server makes of it: bodies of `/generate`, and answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from turnwise.backends.servers.http import ServerGoneError
from turnwise.types import SampledSequence, SampleRequest, StopReason

FILL_CONTEXT = 2**30
FindVersions = Callable[[Sequence[Mapping[str, Any]], int], list[int]]
"""From the server's spans and a number of tokens to the version of each token. It gives none if the server's own
weights are not the run's."""


@dataclass(slots=True)
class ReplyInParts:
    """A reply while it is drawn."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    stop_reason: StopReason = "length"
    versions: list[int] = field(default_factory=list[int])
    """The version that drew each token, where the run replaces the server's own weights; else empty."""
    num_cached: int = 0
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[Sequence[tuple[int, float]] | None] | None = None

    def to_sequence(self) -> SampledSequence:
        return SampledSequence(self.stop_reason, self.tokens, self.logprobs, self.versions or None)

    def add(self, said: dict[str, Any], request: SampleRequest, find_versions: FindVersions, url: str) -> bool:
        """Add what one request brought. Returns whether the reply is complete."""
        meta: dict[str, Any] = said["meta_info"]
        is_first = not self.tokens
        try:
            drawn = [(int(entry[1]), float(entry[0])) for entry in meta.get("output_token_logprobs") or ()]
            finish: dict[str, Any] = meta["finish_reason"]
            kind = str(finish["type"])
            versions = find_versions(meta.get("weight_versions") or (), len(drawn))
            if is_first:
                self._add_prompt(meta, request)
        except (KeyError, IndexError, TypeError, ValueError) as cause:
            raise ServerGoneError(f"{url}/generate returned what is no answer of it: {str(said)[:300]}") from cause
        _check_ids(said, [token for token, _ in drawn], url)
        self.tokens += [token for token, _ in drawn]
        self.logprobs += [logprob for _, logprob in drawn]
        self.versions += versions
        if kind == "abort":
            if finish.get("status_code") is not None or not drawn:
                raise ServerGoneError(f"{url} ended the request: {finish.get('message') or 'no reason was given'}")
            return False  # somebody paused the server; the rest is drawn by another request
        if kind not in ("stop", "length"):
            raise ServerGoneError(f"{url} ended a reply with {kind!r}; expected stop or length")
        if kind == "length":
            return True
        if isinstance(finish.get("matched"), int) and not _is_asked_for(int(finish["matched"]), request):
            return len(self.tokens) >= (request.sampling_params.max_tokens or math.inf)
        self.stop_reason = "stop"
        return True

    def _add_prompt(self, meta: dict[str, Any], request: SampleRequest) -> None:
        self.num_cached = int(meta.get("cached_tokens") or 0)
        if request.include_prompt_logprobs:
            values = [entry[0] for entry in meta["input_token_logprobs"]]
            self.prompt_logprobs = [None if value is None else float(value) for value in values]
        if request.topk_prompt_logprobs:
            self.topk_prompt_logprobs = [
                None if entry is None else [(int(one[1]), float(one[0])) for one in entry]
                for entry in meta["input_top_logprobs"]
            ]


def to_body(request: SampleRequest, so_far: ReplyInParts, name: str) -> dict[str, Any]:
    """The body of `/generate`, which goes on where the reply so far ends."""
    params = request.sampling_params
    stop_ids = sorted(params.stop_ids(()))
    asked: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "min_p": params.min_p,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        # SGLang reads stop ids only where it does not ignore the end of sequence.
        "ignore_eos": params.stop is not None and not stop_ids,
    }
    # Without a number SGLang draws 128 tokens; it lowers one that is too large to what the context holds.
    asked["max_new_tokens"] = (params.max_tokens or FILL_CONTEXT) - len(so_far.tokens)
    if params.seed is not None:
        asked["sampling_seed"] = (params.seed + len(so_far.tokens)) % 2**31
    if stop_ids:
        asked["stop_token_ids"] = stop_ids
    if params.stop_strings():
        asked["stop"] = params.stop_strings()
    body: dict[str, Any] = {
        "rid": name,
        "input_ids": [*map(int, request.prompt), *so_far.tokens],
        "sampling_params": asked,
        "return_logprob": True,
    }
    if not so_far.tokens and (request.include_prompt_logprobs or request.topk_prompt_logprobs):
        body["logprob_start_len"] = 0
        body["top_logprobs_num"] = request.topk_prompt_logprobs
    return body


def _is_asked_for(stop_id: int, request: SampleRequest) -> bool:
    """Whether the caller's stops name this id; without any, the model's end of sequence is meant."""
    named = request.sampling_params.stop_ids(())
    return stop_id in named or (request.sampling_params.stop is None and not named)


def _check_ids(said: dict[str, Any], drawn: list[int], url: str) -> None:
    """The ids with logprobs must be the ids that were drawn; the list of plain ids may lack the stop at its end."""
    plain = said.get("output_ids")
    if isinstance(plain, list) and drawn[: len(cast("list[int]", plain))] != plain:
        raise ServerGoneError(f"{url}/generate returned ids {str(cast(object, plain))[:120]} and logprobs of others")
