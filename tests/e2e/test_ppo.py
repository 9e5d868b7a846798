"""PPO and its critic through the real command on `tiny`: pre-training, checkpoints, and three places to learn from."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from turnwise.cli import main
from turnwise.client.checkpoints import CheckpointStore
from turnwise.client.local import ServiceClient
from turnwise.config.files import load_config
from turnwise.errors import ConfigError
from turnwise.models.facts import read_facts
from turnwise.runlog.reader import RunReader
from turnwise.training.assemble import Parts, assemble, make_optim, make_renderer
from turnwise.training.checkpoint import saved_critic
from turnwise.training.critic import Critic
from turnwise.training.pretrain import Batches, pretrain
from turnwise.types import AdamParams, Datum, ModelInput, TensorData
from turnwise.watch.interrupt import Interrupt

WORLD = f"{Path(__file__).with_name('echo_world.py')}:EchoWorld"
PPO = (
    "model=tiny",
    "method=ppo",
    "train.tasks_per_step=2",
    "train.num_tasks=8",
    "train.learning_rate=1e-3",
    "rollout.group_size=4",
    "eval.tasks=0",
    "run.dialogues=0",
)


def train(directory: Path, *overrides: str, world: str = WORLD) -> RunReader:
    assert main(["train", world, *PPO, *overrides, f"run.dir={directory}"]) == 0
    return RunReader(directory)


def digest(directory: Path, *names: str) -> str:
    """Of the weights that are written there, optimizer state included."""
    found = hashlib.sha256()
    for name in names or ("adapter_model.safetensors", "optimizer.safetensors"):
        for key, tensor in sorted(load_file(directory / name).items()):
            found.update(key.encode() + tensor.tobytes())
    return found.hexdigest()


def saved(run: RunReader) -> tuple[Path, Path]:
    """Where the latest policy and its critic are."""
    row = run.checkpoints()[-1]
    critic = saved_critic(run.directory, row)
    assert critic is not None
    return CheckpointStore(run.directory).directory(row.path), CheckpointStore(run.directory).directory(critic.path)


class Rig:
    """A policy and a critic on `tiny`, ready to be pre-trained."""

    def __init__(self, service: ServiceClient, tiny_dir: Path, *overrides: str, world: str = WORLD) -> None:
        self.config = load_config(world, [*PPO, *overrides])
        self.parts: Parts = assemble(self.config, read_facts(tiny_dir))
        self.trainer = service.create_lora_training_client("tiny", rank=4, seed=1)
        self.client = service.create_critic_training_client("tiny", rank=4, seed=2)
        self.renderer = make_renderer(self.trainer.get_tokenizer(), self.config.rollout)
        self.critic = self.make_critic(self.parts.rollout.max_trajectory_tokens)

    def make_critic(self, max_tokens: int) -> Critic:
        gae = self.parts.method.gae  # type: ignore[union-attr]
        return Critic(
            self.client, self.config.critic, gae, make_optim(self.config, 2e-3), self.renderer, max_tokens=max_tokens
        )

    async def pretrain(self) -> list[dict[str, float]]:
        sampler = await self.trainer.save_weights_and_get_sampling_client_async()
        batches = pretrain(self.critic, self.parts, self.renderer, sampler, Interrupt())
        return [metrics async for metrics in batches]


@pytest.mark.usefixtures("tiny_dir")
async def test_t13_the_policy_is_the_same_to_the_bit_after_the_critic_was_pretrained(
    tmp_path: Path, tiny_dir: Path
) -> None:
    with ServiceClient(data_dir=tmp_path) as service:
        rig = Rig(service, tiny_dir, "critic.pretrain_steps=4")
        before = (await rig.trainer.save_state("before")).path, (await rig.client.save_state("before")).path
        metrics = await rig.pretrain()
        after = (await rig.trainer.save_state("after")).path, (await rig.client.save_state("after")).path
        assert len(metrics) == 4
        digests = [[digest(CheckpointStore(tmp_path).directory(path)) for path in paths] for paths in (before, after)]
        assert digests[0][0] == digests[1][0], "the policy"
        assert digests[0][1] != digests[1][1], "the critic"


async def test_a_critic_comes_to_explain_what_its_policy_earns(tmp_path: Path, tiny_dir: Path) -> None:
    with ServiceClient(data_dir=tmp_path) as service:
        rig = Rig(
            *(service, tiny_dir, "critic.pretrain_steps=20", "critic.pretrain_patience=20"),
            *("critic.pretrain_from=demonstrations", "warmup.steps=1", "warmup.demonstrations=8"),
            world="key_door",
        )
        metrics = await rig.pretrain()
        assert metrics[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
        assert metrics[-1]["explained_variance"] > 0.8
        assert metrics[-1]["loss"] < 0.2 * metrics[0]["loss"]
        assert sum(one["sampled_tokens"] for one in metrics) == 0


async def test_one_batch_of_pretraining_can_move_a_new_critic_further_than_the_clip(
    tmp_path: Path, tiny_dir: Path
) -> None:
    with ServiceClient(data_dir=tmp_path) as service:
        rig = Rig(
            *(service, tiny_dir, "critic.pretrain_steps=2", "critic.pretrain_updates=30", "critic.value_clip=0.1"),
            *("critic.pretrain_from=demonstrations", "warmup.steps=1", "warmup.demonstrations=8"),
            *("critic.pretrain_learning_rate=5e-3",),
            world="key_door",
        )
        first, second = await rig.pretrain()
        assert first["value"] == 0
        assert first["return"] > 0.3
        assert second["value"] == pytest.approx(second["return"], abs=0.15)


async def test_pretraining_ends_when_nothing_gets_better(tmp_path: Path, tiny_dir: Path) -> None:
    with ServiceClient(data_dir=tmp_path) as service:
        overrides = ("critic.pretrain_steps=40", "critic.pretrain_patience=2", "critic.pretrain_learning_rate=1e-9")
        rig = Rig(service, tiny_dir, *overrides)
        assert len(await rig.pretrain()) < 40
        assert rig.critic.is_pretrained


async def test_values_know_the_state_that_a_cut_attempt_was_left_in(tmp_path: Path, tiny_dir: Path) -> None:
    with ServiceClient(data_dir=tmp_path) as service:
        rig = Rig(
            *(service, tiny_dir, "rollout.max_turns=1", "env.options.max_turns=3"),
            world="guess_number",
        )
        sampler = await rig.trainer.save_weights_and_get_sampling_client_async()
        trajectories = (await Batches(rig.parts, rig.renderer, "rollouts").batch(0, sampler)).trajectories
        cut = [one for one in trajectories if one.is_truncated]
        assert cut, "one turn of three ends nothing"
        ones = TensorData([1.0] * 3)
        taught = Datum(ModelInput.from_ints([5, 6, 7]), {"mask": ones, "returns": ones})
        for _ in range(3):  # until it no longer says 0 everywhere
            await rig.client.forward_backward([taught], "value")
            await rig.client.optim_step(AdamParams(learning_rate=1e-2))
        for one, values in zip(trajectories, await rig.critic.values(trajectories), strict=True):
            assert [len(v) for v in values.turns] == [len(turn.sampled_ids) for turn in one.turns]
            assert (values.bootstrap != 0) == one.is_truncated
        shown = await rig.critic.values(cut[:1])
        fallback = await rig.make_critic(max_tokens=1).values(cut[:1])  # the next prompt does not fit
        assert fallback[0].bootstrap == fallback[0].turns[-1][-1] != shown[0].bootstrap


@pytest.mark.usefixtures("tiny_dir")
def test_a_resumed_run_goes_on_with_its_critic_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    small = ("critic.pretrain_steps=3", "train.save_every=2", "rollout.deterministic=true")
    with train(tmp_path / "whole", *small, "train.steps=4") as whole:
        policy, critic = saved(whole)
        assert [step for step, _ in whole.metric("train/critic_explained_variance")] == [1, 2, 3, 4]
        assert len(whole.metric("critic/explained_variance")) == 3
    with train(tmp_path / "half", *small, "train.steps=2"):
        pass
    assert main(["train", "--resume", str(tmp_path / "half"), "train.steps=4"]) == 0
    with RunReader(tmp_path / "half") as half:
        resumed_policy, resumed_critic = saved(half)
        assert len(half.metric("critic/explained_variance")) == 3, "they are not steps of training"
    names = ("adapter_model.safetensors", "value_head.safetensors", "optimizer.safetensors")
    assert digest(resumed_critic, *names) == digest(critic, *names)
    assert digest(resumed_policy) == digest(policy)


@pytest.mark.usefixtures("tiny_dir")
def test_old_critics_go_with_their_policies(tmp_path: Path) -> None:
    options = ("critic.pretrain_steps=0", "train.steps=3", "train.save_every=1", "train.keep_checkpoints=1")
    with train(tmp_path / "run", *options) as run:
        policy, critic = saved(run)
        assert [row.step for row in run.checkpoints()] == [3]
    assert sorted(path.name for path in policy.parent.iterdir()) == ["step-000003"]
    assert sorted(path.name for path in critic.parent.iterdir()) == ["step-000003"]


@pytest.mark.usefixtures("tiny_dir")
def test_a_critic_is_pretrained_from_a_stored_run_of_the_same_world_and_model(tmp_path: Path) -> None:
    with train(tmp_path / "first", "critic.pretrain_steps=0", "train.steps=2"):
        pass
    source = f"critic.pretrain_from={tmp_path / 'first'}"
    with train(tmp_path / "second", "critic.pretrain_steps=3", "train.steps=1", source) as second:
        assert len(second.metric("critic/loss")) == 3
        assert {value for _, value in second.metric("critic/sampled_tokens")} == {0.0}


def test_a_stored_run_of_another_world_is_refused(tmp_path: Path, tiny_dir: Path) -> None:
    with train(tmp_path / "first", "critic.pretrain_steps=0", "train.steps=1"):
        pass
    with ServiceClient(data_dir=tmp_path) as service:
        rig = Rig(service, tiny_dir, f"critic.pretrain_from={tmp_path / 'first'}", world="guess_number")
        with pytest.raises(ConfigError, match=r"was played with env\.name=.*EchoWorld; this run has guess_number"):
            asyncio.run(rig.pretrain())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["method=ppo", "critic.pretrain_from=/nowhere"], "critic.pretrain_from=/nowhere is no run directory"),
        (["method=grpo", "critic.updates=2"], "critic.updates is not read by method=grpo, only by ppo"),
        (
            ["method=ppo", "critic.pretrain_steps=0", "critic.pretrain_updates=2"],
            "not read while critic.pretrain_steps",
        ),
    ],
)
def test_a_critic_that_cannot_be_had_is_refused_before_anything_is_spent(
    capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    assert main(["train", "guess_number", "model=tiny", *overrides, "--plan"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("tiny_dir")
def test_steps_that_went_as_foreseen_are_named_when_they_do_not_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An untrained model never opens a door: a return of 0 is what a new critic says."""
    overrides = [*PPO, "warmup.steps=0", "train.max_empty_steps=2", "critic.pretrain_steps=0"]
    assert main(["train", "key_door", *overrides, f"run.dir={tmp_path / 'run'}"]) != 0
    assert "2 steps in a row left nothing to learn from (groups: 4 without an advantage)" in capsys.readouterr().err
