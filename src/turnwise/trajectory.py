"""What happened, in exact token ids: turns, trajectories, groups. All are frozen and checked when they are made.

    trajectory = Trajectory(task_id="sum-7", turns=(Turn(...), Turn(...)), end_reason=EndReason.TERMINATED, ...)

A turn is one model call and the world's answer to it. Its `sampled_ids` are the ids that the sampler returned, and
exactly these ids are trained: text is never encoded again. This module imports without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, cast, get_args

from turnwise.errors import DataError, Party

Role = Literal["system", "user", "assistant", "tool"]

RewardPart = Literal["outcome", "format", "shaping", "penalty", "judge"]
REWARD_PARTS: tuple[RewardPart, ...] = get_args(RewardPart)
"""The channels that a reward can have; the reward is their sum."""
WORLD_LABEL = "world"
"""The label of an attempt that names its world, in a run that has several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A tool call that the model asked for."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a conversation, as env authors see it.

    >>> import turnwise as tw
    >>> tw.Message(role="user", content="Hello.").content
    'Hello.'
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    """The tool that answered; only tool messages have one."""


class EndReason(StrEnum):
    """Why an attempt ended. Every attempt has exactly one end reason.

    A member declares everything that others ask about it: its text, what it means, whether a limit cut the attempt
    short, and whether a replay with the same seeds ends in the same way. To add one, add a member here and return it
    from `rollout/play.py`. (How one *sample* ended is `types.StopReason`.)
    """

    description: str
    """What happened, as a clause: "the attempt reached its turn limit"."""
    is_truncation: bool
    """A limit ended the attempt, not the task, so its return leaves out what would have come."""
    is_repeatable: bool
    """Whether the same seeds and weights lead to this end again."""

    def __new__(cls, text: str, description: str, is_truncation: bool = False, is_repeatable: bool = True) -> EndReason:
        member = str.__new__(cls, text)
        member._value_ = text
        member.description, member.is_truncation, member.is_repeatable = description, is_truncation, is_repeatable
        return member

    TERMINATED = "terminated", "the env reached an end of the task"
    TRUNCATED = "truncated", "the env cut the attempt short", True
    MAX_TURNS = "max_turns", "the attempt reached its turn limit", True
    MAX_TOKENS = "max_tokens", "the attempt used up its token budget or the model's context", True
    TIME_LIMIT = "time_limit", "the attempt ran out of time", True, False
    UPDATED = "updated", "new weights came, and rollout.kv_across_updates is end", True, False
    UNPARSABLE = "unparsable", "the env could not read a reply, and rollout.on_unparsable is end"
    FAILED = "failed", "a party outside the policy failed, see `Trajectory.failure`", False, False


RESTART = "restart"
"""The `Message.name` that marks a new beginning of a dialogue (`renderers.restart`)."""


def restarted(messages: Sequence[Message]) -> list[Message]:
    """The messages start the dialogue anew: the next prompt shows nothing before them."""
    return [replace(messages[0], name=RESTART), *messages[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Which party failed an attempt, and how."""

    party: Party
    detail: str
    traceback: str = ""
    """The exception with the file, line and text of every frame outside turnwise; empty if nothing was raised."""
    facts: Mapping[str, int | str] = field(default_factory=dict[str, int | str])
    """What a program may want to know: `place` (file and line that raised), `needed_tokens` and `limit_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model call, exactly as it happened, and the world's answer to it."""

    prompt_ids: tuple[int, ...]
    """[P] all ids that the sampler was given."""
    sampled_ids: tuple[int, ...]
    """[S] the ids that the sampler returned, with the stop."""
    sampler_logprobs: tuple[float, ...]
    """[S] logprob of each sampled id under `policy_version`, at `temperature`."""
    policy_version: int
    """The weights that drew it; the oldest of `token_versions` where there are several."""
    token_versions: tuple[int, ...] | None = None
    """[S] the weights that drew each id, where they changed in the middle of the turn; None where they did not."""
    temperature: float = 1.0
    reply: Message
    """The sampled ids, parsed."""
    observation: tuple[Message, ...] = ()
    """The env's answer; it may be empty after the last turn."""
    reward_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """The reward of this turn, by channel (`REWARD_PARTS`)."""
    is_trained: bool = True
    """False leaves the turn out of the loss: an unparsable reply with `rollout.on_unparsable=mask`, or a turn that a
    method does not train. Its reward still counts in returns."""
    is_cut: bool = False
    """The sampler reached its token limit before a stop."""
    is_unparsable: bool = False
    """The env could not read the reply."""
    is_action: bool = False
    """The env read the reply as a command, a query or a call."""
    env_state: str | None = None
    """The env's key for the state before this turn. Equal keys mean equal states."""
    potential: float | None = None
    """The env's potential of that state, for reward shaping; None if the env has none."""
    next_potential: float | None = None
    """The env's potential of the state after this turn."""

    def __post_init__(self) -> None:
        if len(self.sampled_ids) != len(self.sampler_logprobs):
            raise DataError(
                f"{len(self.sampled_ids)} sampled ids but {len(self.sampler_logprobs)} logprobs; "
                "was the sampler asked for logprobs?"
            )
        if not self.sampled_ids:
            raise DataError("a turn without sampled ids; a sampler returns at least the stop token")
        if not self.prompt_ids:
            raise DataError("a turn without a prompt; the first message must render to at least one token")
        if self.token_versions is not None and len(self.token_versions) != len(self.sampled_ids):
            raise DataError(f"{len(self.sampled_ids)} sampled ids but {len(self.token_versions)} versions of them")
        unknown = set(self.reward_parts) - set(REWARD_PARTS)
        if unknown:
            raise DataError(f"unknown reward part {min(unknown)!r}; expected {', '.join(REWARD_PARTS)}")

    @property
    def reward(self) -> float:
        return float(sum(self.reward_parts.values()))

    @property
    def versions(self) -> tuple[int, ...]:
        """[S] the weights that drew each id."""
        return self.token_versions or (self.policy_version,) * len(self.sampled_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The turn at which an attempt leaves the dialogue that its group shares."""

    turn: int
    """The attempt's first own turn, from 0. Earlier turns were played once, for the whole group."""
    seed: int
    """Seeds the sampler from that turn on. (`Trajectory.seed` seeds the env.)"""
    reseeds_env: bool = False
    """Whether the env also gets `seed` at that turn, if it has a `reseed()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at one task.

    >>> import turnwise as tw
    >>> quick = {"eval": {"tasks": 0}, "warmup": {"steps": 0}, "observer": tw.Observer()}
    >>> run = tw.train("guess_number", model="tiny", steps=1, **quick)
    >>> trajectory = run.attempt(1).trajectory
    >>> all(len(turn.sampled_ids) == len(turn.sampler_logprobs) for turn in trajectory.turns)
    True
    """

    task_id: str
    attempt: int
    """Index of the attempt in its group, from 0."""
    seed: int
    """Seeds the env of this attempt, and its sampler if there is no `branch`."""
    start: tuple[Message, ...] = ()
    """The env's first messages."""
    turns: tuple[Turn, ...]
    end_reason: EndReason
    failure: Failure | None = None
    is_success: bool | None = None
    """The env's verdict on the whole attempt; None if it gave none, or if the attempt failed."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    duration_s: float = 0.0
    branch: Branch | None = None
    """None if the attempt shares no turn with others."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Words that the env recorded, such as who the opponent was."""

    def __post_init__(self) -> None:
        if (self.failure is not None) != (self.end_reason is EndReason.FAILED):
            raise DataError(f"end_reason={self.end_reason} and failure={self.failure} contradict each other")
        if not self.turns and self.failure is None:
            raise DataError(f"attempt {self.attempt} at {self.task_id} has no turns and no failure")

    @property
    def total_reward(self) -> float:
        return float(sum(turn.reward for turn in self.turns))

    @property
    def is_truncated(self) -> bool:
        """A limit ended the attempt, not the task, so its return leaves out what would have come."""
        return self.end_reason.is_truncation

    @property
    def is_cut(self) -> bool:
        """A reply of it reached its token limit before a stop."""
        return any(turn.is_cut for turn in self.turns)

    @property
    def messages(self) -> list[Message]:
        """The whole conversation: the first messages, then each reply with the env's answer to it."""
        return [*self.start, *(message for turn in self.turns for message in (turn.reply, *turn.observation))]

    @property
    def is_judged(self) -> bool:
        """Whether it counts in a success rate: the env gave a verdict, or the attempt ended before it could."""
        return self.is_success is not None or self.end_reason is not EndReason.TERMINATED

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens in the attempt's own turns; shared turns were sampled once and are counted by the group."""
        first = 0 if self.branch is None else self.branch.turn
        return sum(len(turn.sampled_ids) for turn in self.turns[first:])


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    """Attempts at one task. Baselines are computed inside a group; failed attempts are kept apart."""

    task_id: str
    trajectories: tuple[Trajectory, ...]
    failed: tuple[Trajectory, ...] = ()
    branch_turn: int | None = None
    """The turn at which the attempts leave their shared dialogue; None if they share none."""
    branch_probability: float = 1.0
    """The probability with which `branch_turn` was drawn."""
    branched_share: float = 1.0
    """Share of the batch's dialogues that reached the turn at which they were to branch."""

    def __post_init__(self) -> None:
        for trajectory in self.trajectories:
            if trajectory.failure is not None:
                raise DataError(f"a failed attempt at {self.task_id} among the scored ones; it belongs in `failed`")

    @property
    def rewards(self) -> Sequence[float]:
        return [trajectory.total_reward for trajectory in self.trajectories]

    @property
    def world(self) -> str:
        """The member of a mix that it was played in; empty in a run with one world."""
        return next((trajectory.labels.get(WORLD_LABEL, "") for trajectory in self.trajectories), "")


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as plain lists and dicts, ready for `json.dumps`; fields keep their names.

    `failure` and `branch` are left out where there are none. Python writes floats so that they come back bit for bit.
    """
    values = asdict(trajectory)
    return {name: value for name, value in values.items() if value is not None or name not in ("failure", "branch")}


def trajectory_from_json(values: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `trajectory_to_json` wrote down: the same numbers, bit for bit."""
    try:
        fields = dict(values)
        failure, branch = fields.pop("failure", None), fields.pop("branch", None)
        return Trajectory(
            start=messages_from_json(fields.pop("start")),
            turns=tuple(turn_from_json(turn) for turn in fields.pop("turns")),
            end_reason=EndReason(fields.pop("stop_reason", None) or fields.pop("end_reason")),  # older: stop_reason
            failure=None if failure is None else Failure(**cast(Any, {**failure, "party": Party(failure["party"])})),
            branch=None if branch is None else Branch(**branch),
            **fields,
        )
    except (KeyError, TypeError, ValueError) as cause:
        raise DataError(f"this is no trajectory as trajectory_to_json writes it: {cause!r}") from cause


def turn_from_json(values: Mapping[str, Any]) -> Turn:
    """A turn as `trajectory_to_json` writes it."""
    fields = dict(values)
    ids = {name: tuple(fields.pop(name)) for name in ("prompt_ids", "sampled_ids", "sampler_logprobs")}
    (reply,) = messages_from_json([fields.pop("reply")])
    versions = fields.pop("token_versions", None)
    ids |= {} if versions is None else {"token_versions": tuple(versions)}
    return Turn(**ids, reply=reply, observation=messages_from_json(fields.pop("observation")), **fields)


def messages_from_json(entries: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Messages as `trajectory_to_json` writes them."""
    found: list[Message] = []
    for entry in entries:
        fields = dict(entry)
        found.append(Message(tool_calls=tuple(ToolCall(**call) for call in fields.pop("tool_calls")), **fields))
    return tuple(found)
