"""The section `rollout` of a run's config: how groups of attempts are played."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from turnwise.envs.base import World
from turnwise.envs.game import GameWorld
from turnwise.envs.joint import leaf_of, leaves
from turnwise.errors import ConfigError
from turnwise.rollout.limits import RolloutLimits
from turnwise.rollout.server_options import OTHER_SAMPLERS, ServerOptions
from turnwise.runtime.section import ONE_OR_MORE

DEFAULT_TURNS, DEFAULT_TOKENS, DEFAULT_CONTEXT = 8, 256, 4096
"""Bounds if neither the config nor the world or the model has one: turns, tokens of a reply and of an attempt."""

MIN_REPLY_S, TOKEN_S = 120.0, 0.25
"""What a server gets for a reply, in all and for each of its tokens, where `server_deadline_s` does not say."""


class RolloutConfig(RolloutLimits, ServerOptions):
    """How attempts are played."""

    backend: str = Field(
        default="local",
        min_length=1,
        description="What samples: `local` is the engine in this process, `vllm` or `sglang` a server, "
        "`vllm_in_process` vLLM's engine without one; your own backend is `module:Class` or `path/to/file.py:Class` "
        "(docs/backends.md).",
    )
    use_conversation_multi_turn: bool = Field(
        default=True,
        description="Use one message per turn; false keeps all turns of an attempt in one assistant message.",
    )
    renderer: Literal["auto", "chatml", "template"] = Field(
        default="auto",
        description="How messages become tokens; `auto` is ChatML if the model's template is ChatML, else the "
        "model's template.",
    )
    strip_thinking: bool = Field(
        default=False, description="For ChatML: remove the thinking from earlier replies, as Qwen3's format does."
    )
    group_size: int = Field(
        default=8,
        ge=1,
        description="Attempts per task; advantages are centred inside this group. 1 works only with a method that "
        "compares no attempts of one task; any other refuses it.",
    )
    min_group_size: int = Field(
        default=2,
        ge=1,
        description="Drop and count a group that has fewer attempts left than this; at least 2 in training.",
    )
    same_start: bool = Field(
        default=True,
        description="All attempts of a group share the env's seed, so they start in the same world and differ "
        "only by what the policy says. false: each attempt has its own seed, so luck is compared "
        "too. Evaluations always use false.",
    )
    temperature: float = Field(
        default=1.0,
        ge=0,
        le=100,
        description="Sampling temperature; the trainer uses the same one. There is no top-p or top-k, because "
        "the loss needs logprobs of the whole distribution.",
    )
    max_retries: int = Field(default=2, ge=0, description="How often to play a failed attempt again, in a new env.")
    max_concurrency: int = Field(default=64, ge=1, description="Attempts at the same time, over all groups.")
    stop: Annotated[tuple[str, ...], ONE_OR_MORE] = Field(
        default=(), description="Strings that end a reply, in addition to the format's end of turn."
    )
    on_unparsable: Literal["penalise", "mask", "end"] = Field(
        default="penalise",
        description="What happens to a reply that the env cannot parse: it gets a penalty, it is left out of "
        "the loss, or it ends the attempt.",
    )
    unparsable_penalty: float = Field(
        default=0.0, ge=0, description="What `penalise` subtracts from the reward; 0 keeps the env's own reward."
    )
    quarantine_task_after: int = Field(
        default=2,
        ge=1,
        description="Stop playing a task after this many groups in a row in which every attempt failed.",
    )
    quarantine_world_after: int = Field(
        default=200,
        ge=1,
        description="Stop playing altogether after this many tries in a row, over all tasks, in which the env "
        "or a tool failed.",
    )
    deterministic: bool = Field(
        default=False,
        description="Make each reply independent of what else is sampled, so a resumed run equals an "
        "uninterrupted one bit for bit at any max_concurrency. It decodes one sequence at a time "
        "and reuses no prefix, so it is slower. It needs max_staleness 0.",
    )
    kv_across_updates: Literal["recompute", "keep", "end"] = Field(
        default="recompute",
        description="What to do when the weights change during a dialogue: sample its next turns with the new "
        "weights, which read the dialogue again (recompute), finish it with the old weights (keep), or "
        "end it after the turn under way (end). Logprobs are exact in all cases; docs/backends.md says what they mean "
        "for a server whose whole weights are replaced.",
    )

    @model_validator(mode="after")
    def _options_fit_the_backend(self) -> Self:
        self.check_backend(self.backend)
        if self.backend == "sglang" and not self.use_conversation_multi_turn:
            raise NotImplementedError("`use_conversation_multi_turn=False` is not supported for SGLang backend")
        if self.deterministic and self.backend in OTHER_SAMPLERS:
            raise ValueError(f"deterministic is not read with backend={self.backend}: a server batches as it likes")
        return self

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        if self.unparsable_penalty and self.on_unparsable != "penalise":
            raise ValueError(
                f"unparsable_penalty={self.unparsable_penalty} is not read with on_unparsable={self.on_unparsable}"
            )
        if self.strip_thinking and (self.renderer == "template" or not self.use_conversation_multi_turn):
            raise ValueError("strip_thinking is read by the ChatML renderer with one message per turn only")
        if self.min_group_size > max(2, self.group_size):
            raise ValueError(
                f"min_group_size={self.min_group_size} is more than group_size={self.group_size}; "
                "every group would be dropped"
            )
        return self

    def for_world(self, world: World | GameWorld, context_length: int = 0) -> Self:
        """The same config with every bound that is 0 replaced by the world's or the model's bound."""
        wanted = self.max_trajectory_tokens or context_length or DEFAULT_CONTEXT
        return self.model_copy(
            update={
                "max_turns": self.max_turns or getattr(world, "max_turns", DEFAULT_TURNS),
                "max_tokens_per_turn": self.max_tokens_per_turn or getattr(world, "max_tokens", DEFAULT_TOKENS),
                "max_trajectory_tokens": min(wanted, context_length or wanted),
            }
        )

    def for_task(self, world: World, task_id: str, context_length: int = 0) -> Self:
        """`for_world` of the world that plays the task, where several are joined."""
        return self.for_world(leaves(world)[leaf_of(world, task_id)], context_length)

    def check_bounds(self) -> None:
        """Refuse a config with a bound that is still 0: an attempt would end before its first reply."""
        for name in ("max_turns", "max_tokens_per_turn", "max_trajectory_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}=0 is for the world to fill in; set it, or play config.for_world(world)")

    @property
    def reply_deadline_s(self) -> float:
        """Seconds that one server gets for one reply. It comes in one piece, so a slow server looks like one that
        hangs until then; a reply may have 4 tokens a second."""
        return self.server_deadline_s or max(MIN_REPLY_S, TOKEN_S * self.max_tokens_per_turn)

    @property
    def smallest_group(self) -> int:
        """The fewest good attempts that a group needs; with fewer it is dropped."""
        return min(self.min_group_size, self.group_size)

    @property
    def logprob_temperature(self) -> float:
        """The temperature of the sampled logprobs; a greedy sampler returns them at temperature 1."""
        return self.temperature or 1.0
