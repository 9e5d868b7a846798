from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turnwise.client.fake import ScriptedSampler
from turnwise.config.files import load_config
from turnwise.credit.datums import trajectory_to_datums
from turnwise.envs.base import EnvStep, assistant, user
from turnwise.envs.registry import get_world
from turnwise.envs.tools import format_tool_call
from turnwise.errors import ConfigError
from turnwise.memory.config import MemoryConfig
from turnwise.memory.renderer import MemoryRenderer
from turnwise.memory.world import MemoryEnv, MemoryWorld
from turnwise.renderers import get_renderer
from turnwise.renderers.base import Renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.rollout.certify import certify
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.group import Rollout
from turnwise.rollout.replay import replay
from turnwise.trajectory import EndReason, Message, Trajectory, Turn
from turnwise.types import ModelInput, SamplingParams

MEMORY = MemoryConfig(window=4, summary_tokens=12)
WORLD = MemoryWorld(get_world("workflow", rows=5, columns=4, sections=1), MEMORY)


@pytest.fixture(scope="session")
def tokenizer(tiny_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_dir)


@pytest.fixture(scope="session")
def renderer(tokenizer: Any) -> Renderer:
    return MemoryRenderer(get_renderer(tokenizer), MEMORY)


class Expert(ScriptedSampler):
    """Reads the prompt as a policy does, and nothing else. It notes how many tokens each reply may have."""

    def __init__(self, tokenizer: Any, renderer: Renderer) -> None:
        super().__init__(self._reply, tokenizer=tokenizer)
        self._renderer = renderer
        self.limits: list[int] = []

    def _reply(self, prompt_ids: list[int]) -> Sequence[int]:
        text = self.get_tokenizer().decode(prompt_ids)
        last = text.rpartition("<|im_start|>user\n")[2]
        seal = text.replace("Memory: ", "").rpartition("The seal is ")[2].split(".")[0].removeprefix("now ")
        if "Memory is full" in last:
            said = f"The seal is {seal}."
        else:
            word = last.rpartition("write ")[2].split(".")[0]
            said = seal if word == "the seal" else word
        return self._renderer.encode_reply(assistant(said))

    def sample_async(
        self, prompt: ModelInput, num_samples: int = 1, sampling_params: SamplingParams | None = None, **more: Any
    ) -> Any:
        assert sampling_params is not None
        self.limits.append(sampling_params.max_tokens or 0)
        return super().sample_async(prompt, num_samples=num_samples, sampling_params=sampling_params, **more)


async def play_one(tokenizer: Any, renderer: Renderer, *, max_context: int = 300) -> tuple[Trajectory, Expert]:
    sampler = Expert(tokenizer, renderer)
    config = RolloutConfig(group_size=1, min_group_size=1, max_trajectory_tokens=max_context)
    rollout = Rollout(WORLD, sampler, renderer, config.for_world(WORLD, 1024))
    result = await rollout.play(WORLD.tasks("train", 1, seed=0), seed=0)
    (group,) = result.groups
    return group.trajectories[0], sampler


async def test_an_attempt_longer_than_the_context_succeeds_by_its_summaries(tokenizer: Any, renderer: Renderer) -> None:
    attempt, sampler = await play_one(tokenizer, renderer)
    assert attempt.is_success is True
    longest = max(len(turn.prompt_ids) + len(turn.sampled_ids) for turn in attempt.turns)
    whole = sum(len(turn.sampled_ids) + len(turn.observation) for turn in attempt.turns)
    assert longest <= 300 < whole + len(attempt.turns) * 10
    assert len(attempt.turns) == 24  # 20 cells, and a summary after every fourth but the last
    assert [limit for limit in sampler.limits if limit == 12] == [12] * 4
    assert attempt.metrics["summaries"] == 4


async def test_every_rewritten_prompt_starts_a_datum_with_exactly_its_ids(tokenizer: Any, renderer: Renderer) -> None:
    attempt, _ = await play_one(tokenizer, renderer)
    datums = trajectory_to_datums(attempt, [float(index) for index in range(len(attempt.turns))])
    assert len(datums) == 5
    turns = iter(attempt.turns)
    num_trained = 0
    for index, datum in enumerate(datums):
        ids = datum.model_input.to_ints()
        first = next(turns)
        assert tuple(ids[: len(first.prompt_ids)]) == first.prompt_ids
        for _ in range(4 - (index == 4)):
            next(turns)
        num_trained += round(sum(datum.loss_fn_inputs["mask"].tolist()))
    assert num_trained == attempt.num_sampled_tokens
    assert all(turn.is_trained for turn in attempt.turns)


async def test_an_attempt_with_summaries_replays_exactly(tokenizer: Any, renderer: Renderer) -> None:
    attempt, _ = await play_one(tokenizer, renderer)
    task = WORLD.tasks("train", 1, seed=0)[0]
    config = RolloutConfig(group_size=1, min_group_size=1, max_trajectory_tokens=300).for_world(WORLD, 1024)
    assert (await replay(WORLD, task, attempt, renderer, config)).is_exact


async def test_demonstrations_show_the_prompts_that_a_rollout_builds(tokenizer: Any, renderer: Renderer) -> None:
    attempt, _ = await play_one(tokenizer, renderer)
    (dialogue,) = WORLD.demonstrations(1, 0)
    written = dialogue_to_turns(renderer, dialogue)
    assert [turn.prompt_ids for turn in written] == [turn.prompt_ids for turn in attempt.turns]
    assert [turn.reply_ids for turn in written] == [turn.sampled_ids for turn in attempt.turns]


async def test_a_summary_does_not_reach_the_world_and_its_state_has_a_key_of_its_own() -> None:
    world = MemoryWorld(get_world("key_door", num_rooms=3), MemoryConfig(window=1, summary_tokens=5))
    task = world.tasks("train", 1, seed=0)[0]
    env: Any = world.make_env(task, 0)
    await env.start()
    before = env.state_key()
    first = await env.step(assistant("open"))
    assert first.max_tokens == 5
    assert first.messages[-1].name == "memory"
    assert env.state_key().endswith("|summary")
    fork = env.fork()
    again = await env.step(assistant("open open open"))
    assert not again.is_unparsable
    assert again.messages == tuple(first.messages[:-1])
    assert env.state_key() not in (before, fork.state_key())
    assert (await fork.step(assistant("x"))).messages == again.messages


async def test_notes_are_kept_outside_the_prompt_and_cost_the_world_nothing() -> None:
    world = MemoryWorld(get_world("key_door", num_rooms=3), MemoryConfig(window=2, notes=True))
    env: Any = world.make_env(world.tasks("train", 1, seed=0)[0], 0)
    start = await env.start()
    assert "write_note" in start[0].content
    key = env.state_key()
    noted = await env.step(assistant(format_tool_call("write_note", name="door", text="red")))
    assert noted.messages[0].content == "noted: door"
    assert noted.messages[0].role == "tool"
    assert env.state_key().startswith(key)
    assert env.state_key() != key
    both = await env.step(assistant(f"{format_tool_call('recall_note', name='door')} open"))
    assert [message.content for message in both.messages] == ["red", "It is locked."]
    missing = await env.step(assistant(format_tool_call("recall_note", name="window")))
    assert missing.messages[0].content == "error: no note 'window'; the notes are: door"
    assert isinstance(env, MemoryEnv)


class AsksForShortReplies:
    """An env that allows the first reply what the run does, and each later one 3 tokens."""

    async def start(self) -> list[Message]:
        return [user("say something")]

    async def step(self, reply: Message) -> EnvStep:  # noqa: ARG002
        return EnvStep(messages=[user("more")], max_tokens=3)

    async def close(self) -> None:
        pass


async def test_what_the_world_allows_a_reply_holds_after_a_summary_and_after_a_note() -> None:
    env = MemoryEnv(AsksForShortReplies(), MemoryConfig(window=2, summary_tokens=5, notes=True))
    await env.start()
    assert (await env.step(assistant(format_tool_call("write_note", name="a", text="b")))).max_tokens == 0
    assert (await env.step(assistant("x"))).max_tokens == 5, "the window is full: a summary is next"
    assert (await env.step(assistant("a summary"))).max_tokens == 3
    assert (await env.step(assistant(format_tool_call("recall_note", name="a")))).max_tokens == 3


async def test_an_attempt_that_wrote_nothing_counts_as_none_and_is_not_left_out_of_the_mean() -> None:
    env = MemoryEnv(AsksForShortReplies(), MemoryConfig(window=2, summary_tokens=5, notes=True))
    await env.start()
    assert (await env.step(assistant("x"))).info == {"summaries": 0, "notes": 0}
    await env.step(assistant("x"))
    assert (await env.step(assistant("a summary"))).info == {"summaries": 1, "notes": 0}
    noted = await env.step(assistant(f"{format_tool_call('write_note', name='a', text='b')} x"))
    assert noted.info == {"summaries": 1, "notes": 1}
    plain = MemoryEnv(AsksForShortReplies(), MemoryConfig(window=2))
    await plain.start()
    assert not (await plain.step(assistant("x"))).info


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["method=gspo"], "method=gspo has one ratio for a whole attempt"),
        (["rollout.use_conversation_multi_turn=false"], "keeps an attempt in one message"),
    ],
)
def test_what_cannot_work_with_a_memory_is_refused_by_name(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config("key_door", ["memory.window=4", *options])


def test_methods_that_can_learn_with_a_memory_are_taken() -> None:
    for method in ("grpo", "rloo", "ppo", "gigpo", "mt_grpo", "la_grpo", "refuel", "dpo", "rft", "reinforce_pp"):
        assert load_config("key_door", ["memory.window=4", f"method={method}"]).memory.window == 4


def test_the_certificate_holds_where_two_rewritten_prompts_are_the_same() -> None:
    """A policy that goes round in circles writes the same summary twice, and the world says the same again."""
    prompts = [(1,), (1, 5, 2), (1, 7), (1, 7, 5, 2), (1, 7), (1, 7, 5, 2)]
    replies = [(5,), (6,), (5,), (6,), (5,), (8, 8)]
    turns = tuple(
        Turn(
            prompt_ids=prompt,
            sampled_ids=reply,
            sampler_logprobs=(-1.0,) * len(reply),
            policy_version=0,
            reply=assistant("x"),
            observation=(user("y"),),
        )
        for prompt, reply in zip(prompts, replies, strict=True)
    )
    attempt = Trajectory(
        task_id="t", attempt=0, seed=0, start=(user("z"),), turns=turns, end_reason=EndReason.TERMINATED
    )
    found = certify([attempt], lambda datums: [[-1.0] * len(datum.model_input.to_ints()) for datum in datums])
    assert found.is_exact
    assert [one.link for one in found.turns] == ["first", "extends", "splits", "extends", "splits", "extends"]
