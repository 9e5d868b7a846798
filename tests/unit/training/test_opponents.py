"""Who plays the other seat: what the option means, what fails, what a resumed run has, what one batch computes."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest

import turnwise as tw
from local_server import serving, unused_address
from turnwise.client.fake import ScriptedSampler
from turnwise.client.futures import ApiFuture
from turnwise.client.local import ServiceClient
from turnwise.client.publish import VersionedSampler
from turnwise.commands.inspect import run_certify, run_replay
from turnwise.commands.play import run_eval
from turnwise.config.config import Config
from turnwise.credit.advantages import center_by_group
from turnwise.envs.base import Task, World, assistant, user
from turnwise.envs.registry import get_world
from turnwise.errors import ConfigError, Party
from turnwise.models.store import fetch_model
from turnwise.opponents.players import SamplerOpponent
from turnwise.renderers import get_renderer
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.group import play_groups
from turnwise.rollout.self_play import split_seats
from turnwise.runlog.reader import RunReader
from turnwise.training.opponent_words import check_opponents, check_panel_stays, find_source
from turnwise.training.opponents import Opponents
from turnwise.training.policy import find_policy
from turnwise.trajectory import EndReason, Trajectory, TrajectoryGroup, Turn
from turnwise.types import AdamParams, Datum, ModelInput, SampleRequest, SampleResponse, SamplingParams

pytestmark = pytest.mark.model
QUICK: dict[str, Any] = {
    "model": "tiny",
    "eval": {"tasks": 1},
    "warmup": {"steps": 0},
    "rollout": {"group_size": 2, "max_retries": 1, "max_tokens_per_turn": 6},
    "train": {"tasks_per_step": 2, "num_tasks": 8},
    "observer": tw.Observer(),
}


WEIGHTS = ("base_weight", "last_weight", "best_weight", "scripted_weight")


def make_config(words: str, world: str = "negotiate", **sections: Any) -> Config:
    return Config.model_validate(
        {"model": {"name": "tiny"}, "env": {"name": world, "options": {"opponent": words}}, **sections}
    )


def check(words: str, world: str = "negotiate", **sections: Any) -> None:
    check_opponents(make_config(words, world, **sections), get_world(world, opponent=words))


def test_an_option_means_a_script_a_model_or_an_address_in_every_world_with_two_sides() -> None:
    for name in ("negotiate", "tic_tac_toe", "twenty_questions", "bargain", "customer_service"):
        world: Any = get_world(name)
        assert find_source(world.opponent, world).kind == "script"
        for words, kind in (("base", "base"), ("tiny", "model"), ("http://a/v1", "address"), ("pool", "pool")):
            assert find_source(words, world).kind == kind
        with pytest.raises(ConfigError, match="expected a script"):
            find_source("no-such-model", world)


def test_options_that_no_opponent_reads_are_refused() -> None:
    check("base")
    check("pool", opponent={"snapshot_every": 2, "panel": ["tough", "base"]})
    refused: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("tough", {"opponent": {"temperature": 0.5}}, "not read"),
        ("base", {"opponent": {"snapshot_every": 2}}, "not read"),
        ("self", {"opponent": {"panel": ["pool"]}}, "changes from step to step"),
        ("base", {"opponent": {"train": "both"}}, "not read"),
        ("http://127.0.0.1:1/v1", {}, "opponent.model is empty"),
        ("pool", {"opponent": dict.fromkeys(WEIGHTS, 0)}, "the pool is empty"),
        ("pool", {"rollout": {"same_start": False}}, "meet different opponents"),
        ("base", {"opponent": {"deadline_s": 90}}, "step_deadline_s"),
        ("self", {"opponent": {"train": "both"}, "method": {"name": "la_grpo"}}, "plays groups"),
    )
    for opponent, sections, why in refused:
        with pytest.raises(ConfigError, match=why):
            check(opponent, **sections)
    for option in ({"device": "cpu"}, {"kv_cache_gib": 2.0}):
        with pytest.raises(ConfigError, match="is for an opponent of another base model"):
            check("tiny", opponent=option)  # the policy's own model, by its name
    itself = make_config("tough", opponent={"panel": ["tough", "self"]})
    check_opponents(itself, get_world("negotiate", opponent="tough"))  # `turnwise eval` may, with weights that stay
    with pytest.raises(ConfigError, match="learns between the evaluations"):
        check_panel_stays(itself, get_world("negotiate", opponent="tough"))
    alone = Config.model_validate({"env": {"name": "key_door"}, "opponent": {"temperature": 0.5}})
    with pytest.raises(ConfigError, match="has no opponent"):
        check_opponents(alone, get_world("key_door"))


async def garbage(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001 - the ASGI signature
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>busy</html>"})


async def silence(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
    if scope["type"] == "http":
        await asyncio.sleep(1)


async def test_an_address_that_is_dead_hangs_or_talks_garbage_is_to_blame_and_nothing_is_scored() -> None:
    tokenizer: Any = _tokenizer()
    renderer = get_renderer(tokenizer)
    policy = ScriptedSampler(lambda _: renderer.encode_reply(assistant("Offer: rent=900")), tokenizer=tokenizer)
    rollout = RolloutConfig(group_size=2, max_retries=1, max_trajectory_tokens=2048)
    with serving(garbage) as mad, serving(silence) as mute:
        for address, words in ((unused_address(), "ConnectError"), (mad, "expected a chat"), (mute, "no answer with")):
            config = make_config(address, opponent={"model": "m", "deadline_s": 0.4})
            world = get_world("negotiate", opponent=address)
            tasks = world.tasks("train", 2, 0)
            with ServiceClient() as service, Opponents(config, world, service, rollout.for_world(world)) as opponents:
                opponents.open()
                played = await play_groups(opponents.world, tasks, policy, renderer, rollout, seed=0)
            assert not played.groups
            failures = [one.failure for group in played.dropped for one in group.failed if one.failure]
            assert len(failures) == 4
            assert {failure.party for failure in failures} == {Party.OPPONENT}
            assert any(words in failure.detail for failure in failures), failures
            assert played.stats.metrics()["rollout/failures_opponent"] == 8  # each was tried twice


def test_a_pool_is_recorded_resumed_and_goes_on_without_a_snapshot_that_vanished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = {"snapshot_every": 1, "last_weight": 50.0, "panel": ["base", "random"], "keep_last": 2, "best_weight": 0}
    env = {"options": {"opponent": "pool", "max_turns": 2}}
    changes = {"eval": {"tasks": 1, "keep_best": False}, "train": {**QUICK["train"], "keep_checkpoints": 1}}
    run = tw.train("negotiate", steps=2, directory=tmp_path / "run", env=env, opponent=pool, **{**QUICK, **changes})
    (gone,) = run.directory.glob("checkpoints/*/sampler_weights/opponent-000001")
    orphan = shutil.copytree(gone, gone.with_name("opponent-000009"))  # after the checkpoint that the run goes on from
    with RunReader(run.directory) as before:
        played = [(row, before.attempt(row.id).trajectory) for row in before.attempts()]
        names = Counter(attempt.labels["opponent"] for _, attempt in played)
        drawn = sum(value for _, value in before.metric("rollout/tokens_drawn"))
        own = [turn.sampled_ids for row, attempt in played if row.phase == "train" for turn in attempt.turns]
        assert drawn == sum(map(len, own)), "the opponent's tokens are nobody's"
        for group in {(row.step, row.task_id) for row, _ in played if row.phase == "train"}:
            assert len({one.labels["opponent"] for row, one in played if (row.step, row.task_id) == group}) == 1
        assert names["base"] >= 2
        assert names["snapshot_1"]
        assert "opponent/eval_reward_random" in before.metric_names()
    run.close()
    shutil.rmtree(gone)
    again = tw.Run.resume(run.directory, overrides=["train.steps=4"], observer=tw.Observer())
    with RunReader(again.directory) as after:
        (lost,) = [event for event in after.events() if event.kind == "opponent_lost"]
        assert "snapshot_1 is left out" in lost.detail["why"]
        later = {after.attempt(row.id).trajectory.labels["opponent"] for row in after.attempts() if row.step == 3}
        assert "snapshot_1" not in later
        assert "snapshot_2" in later
        assert {"opponent/elo_start", "opponent/elo_snapshot_2"} <= set(after.metric_names())
    assert not orphan.exists()
    kept = {place.name for place in run.directory.glob("checkpoints/*/sampler_weights/*")}
    assert kept == {"opponent-000003", "opponent-000004"}, "the files of those that left the pool are gone"
    capsys.readouterr()
    assert run_eval(str(run.directory), None, "last", [], as_json=True) == 0
    assert set(json.loads(capsys.readouterr().out)["by_opponent"]) == {"base", "random"}
    with find_policy(str(run.directory), step="last") as policy:
        world = get_world("negotiate", opponent="pool")
        rollout = RolloutConfig(max_trajectory_tokens=2048, max_tokens_per_turn=6).for_world(world)
        with policy.opposed(world, rollout) as against:
            names = {asyncio.run(_who_plays(against, task)) for task in world.tasks("train", 4, 0)}
        assert names & {"snapshot_3", "snapshot_4"}, "the pool of the checkpoint"


def test_a_run_whose_whole_pool_vanished_says_so_before_it_plays_and_goes_on_as_it_advises(tmp_path: Path) -> None:
    alone = {"snapshot_every": 9, "base_weight": 0, "best_weight": 0, "scripted_weight": 0, "panel": ["random"]}
    env = {"options": {"opponent": "pool", "max_turns": 2}}
    run = tw.train("negotiate", steps=1, directory=tmp_path / "run", env=env, opponent=alone, **QUICK)
    run.close()
    for gone in run.directory.glob("checkpoints/*/sampler_weights/*"):
        shutil.rmtree(gone)
    with pytest.raises(ConfigError, match=r"no member.*snapshot_0 is left out.*opponent\.base_weight=1"):
        tw.Run.resume(run.directory, overrides=["train.steps=2"], observer=tw.Observer())
    changes = ["train.steps=2", "opponent.base_weight=1"]
    again = tw.Run.resume(run.directory, overrides=changes, observer=tw.Observer())
    with RunReader(again.directory) as reader:
        rows = [row for row in reader.attempts(phase="train") if row.step == 2]
        assert {reader.attempt(row.id).trajectory.labels["opponent"] for row in rows} == {"base"}
    again.close()


async def test_the_policy_that_training_begins_with_is_the_pools_first_snapshot() -> None:
    own_only = {"base_weight": 0, "scripted_weight": 0, "panel": ["base"]}
    warm = {"warmup": {"steps": 1}}
    for sections, expected in (
        ({"opponent": own_only}, ["snapshot_0"]),
        (warm, ["snapshot_0"]),
        ({"warmup": {"steps": 0}}, []),  # the base model itself, which is a member
    ):
        config = make_config("pool", **{"opponent": {"panel": ["base"]}, **sections})
        world = get_world("negotiate", opponent="pool")
        check_opponents(config, world)
        with ServiceClient() as service:
            rollout = RolloutConfig(max_trajectory_tokens=2048).for_world(world)
            with Opponents(config, world, service, rollout) as opponents:
                opponents.open()
                assert opponents.pool is not None
                trainer = service.create_lora_training_client("tiny", rank=4, seed=0)
                for _ in range(2):  # a run that goes on before its first step has it from its checkpoint
                    await opponents.before_first_step(trainer)
                assert list(opponents.pool.snapshots) == expected
                (task,) = world.tasks("train", 1, 0)
                drawn = {opponents.pool.draw(task, seed).name for seed in range(40)}
                assert drawn == {"snapshot_0"} if sections.get("opponent") else "base" in drawn


def test_a_critic_learns_ahead_from_games_against_the_pools_first_snapshot(tmp_path: Path) -> None:
    """The policy does not change meanwhile, and the pool may have nobody else."""
    options = ["method=ppo", "critic.pretrain_steps=1", "env.options.opponent=pool", "opponent.base_weight=0"]
    options += [
        "opponent.scripted_weight=0",
        "opponent.panel=[base]",
        "warmup.steps=1",
        "warmup.demonstrations=8",
        "eval.tasks=0",
    ]
    options += ["train.tasks_per_step=1", "rollout.group_size=2"]
    run = tw.train("negotiate", model="tiny", steps=1, directory=tmp_path, overrides=options, observer=tw.Observer())
    assert len(run.metric("critic/loss")) == 1
    assert run.state == "finished"


def test_policies_with_different_adapters_in_one_batch_sample_as_each_does_alone() -> None:
    with ServiceClient() as service:
        samplers = [service.create_sampling_client(base_model="tiny"), *(_trained(service, seed) for seed in (1, 2))]
        tokenizer: Any = samplers[0].get_tokenizer()
        prompts = [ModelInput.from_ints(tokenizer.encode(text)) for text in ("Offer: rent=900", "The hat is worth 3.")]
        asked = [(sampler, prompt) for sampler in samplers for prompt in prompts]
        params = SamplingParams(max_tokens=24, temperature=1.0, seed=5)
        alone = [sampler.sample(prompt, 1, params).result().sequences[0] for sampler, prompt in asked]
        together = [sampler.sample(prompt, 1, params) for sampler, prompt in asked]
        for own, future in zip(alone, together, strict=True):
            other = future.result().sequences[0]
            assert list(own.tokens) == list(other.tokens)
            assert own.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert len({tuple(one.tokens) for one in alone[::2]}) == 3, "the adapters differ"


async def test_self_is_the_newest_policy_and_the_base_stays_the_base() -> None:
    config = make_config("self", opponent={"panel": ["base"]})
    world = get_world("negotiate", opponent="self")
    with ServiceClient() as service:
        rollout = RolloutConfig(max_trajectory_tokens=2048).for_world(world)
        with Opponents(config, world, service, rollout) as opponents:
            opponents.open()
            trained = _trained(service, 3)
            (task,) = world.tasks("train", 1, 0)

            async def heard(words: str) -> str:
                env = opponents.world_against(words).make_env(task, 0)
                await env.start()
                step = await env.step(assistant("Hello."))
                return step.labels["opponent_said"]

            opponents.follow(VersionedSampler(service.create_sampling_client(base_model="tiny"), 0))
            base = await heard("base")
            assert await heard("self") == base
            opponents.follow(VersionedSampler(trained, 1))
            assert await heard("self") != base
            assert await heard("base") == base


def test_both_seats_are_trained_certified_and_replayed_each_with_its_own_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"options": {"opponent": "self", "max_turns": 2}}
    panel = {"train": "both", "panel": ["random"]}
    run = tw.train("negotiate", steps=2, directory=tmp_path / "run", env=env, opponent=panel, **QUICK)
    with RunReader(run.directory) as reader:
        rows = [row for row in reader.attempts() if row.phase == "train"]
        played = {row.id: reader.attempt(row.id).trajectory for row in rows}
        seats = Counter((row.step, played[row.id].task_id, played[row.id].labels["seat"]) for row in rows)
        assert set(seats.values()) == {2}, "two games of each task, and both seats of each game"
        assert len(seats) == 2 * 2 * 2
        assert len({(row.step, row.task_id, row.attempt) for row in rows}) == len(rows), "nothing is stored twice"
        assert reader.metric("rollout/groups_kept")[0][1] == 4, "a seat is a group of its own"
        assert [value for _, value in reader.metric("opponent/seat_gap")] == [0, 0], "the base comes to no deal"
        assert [certificate.is_exact for certificate in reader.certificates()] == [True, True]
    assert run_certify(str(run.directory), with_turns=False) == 0
    first = next(iter(played))
    for number in (first, first + 2):
        assert run_replay(str(run.directory), number) == 0
    assert "replayed exactly" in capsys.readouterr().out
    run.close()


def test_a_seat_is_compared_with_itself_only() -> None:
    both = _group([(0, 0.9), (0, 0.7), (1, 0.1), (1, 0.3)])
    first, second = split_seats(both)
    assert (first.rewards, second.rewards) == ([0.9, 0.7], [0.1, 0.3])
    assert [list(center_by_group(list(group.rewards))) for group in (first, second)] == [
        pytest.approx([0.1, -0.1]),
        pytest.approx([-0.1, 0.1]),
    ]
    assert split_seats(_group([(None, 0.5), (None, 0.1)]))[0].rewards == [0.5, 0.1]


def _group(results: list[tuple[int | None, float]]) -> TrajectoryGroup:
    def attempt(index: int, seat: int | None, reward: float) -> Trajectory:
        turn = Turn(
            prompt_ids=(1,),
            sampled_ids=(2,),
            sampler_logprobs=(-1.0,),
            policy_version=0,
            reply=assistant("Hi"),
            reward_parts={"outcome": reward},
        )
        labels = {} if seat is None else {"seat": str(seat)}
        end = EndReason.TERMINATED
        return Trajectory(task_id="t", attempt=index, seed=0, turns=(turn,), end_reason=end, labels=labels)

    attempts = tuple(attempt(index, *result) for index, result in enumerate(results))
    return TrajectoryGroup(task_id="t", trajectories=attempts)


def test_another_base_model_is_loaded_beside_the_policys(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(fetch_model("tiny").directory, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 768}))
    env = {"name": "twenty_questions", "options": {"opponent": str(other)}}
    engine = {"context_length": 1000}  # of the policy; the opponent's own context is shorter
    run = tw.train("twenty_questions", steps=1, directory=tmp_path / "run", env=env, engine=engine, **QUICK)
    with RunReader(run.directory) as reader:
        assert {reader.attempt(row.id).trajectory.labels["opponent"] for row in reader.attempts()} == {str(other)}
    run.close()


def test_weights_of_the_policys_base_model_speak_as_the_policy_and_a_run_as_it_was_trained(tmp_path: Path) -> None:
    """What each opponent forgets of its own words, and what ends its replies."""
    env = {"options": {"opponent": "fair"}}
    spoken = {**QUICK["rollout"], "stop": ["###"], "strip_thinking": True}
    run = tw.train("negotiate", steps=1, directory=tmp_path / "run", env=env, **{**QUICK, "rollout": spoken})
    (own,) = run.directory.glob("checkpoints/*/weights/step-*")
    other = tmp_path / "other"
    shutil.copytree(fetch_model("tiny").directory, other)
    config = make_config("base", rollout={"stop": ["\n\n"]})
    world = get_world("negotiate", opponent="base")
    with ServiceClient() as service, Opponents(config, world, service, config.rollout.for_world(world)) as opponents:
        path = service.create_lora_training_client("tiny", rank=4).save_weights_for_sampler("alone").result().path
        for words, stop, keeps in (
            ("base", ("\n\n",), True),
            (path, ("\n\n",), True),
            (str(run.directory), ("###",), False),
            (str(own), ("###",), False),
            (str(other), (), True),
        ):
            player = opponents.player(words)
            assert isinstance(player, SamplerOpponent)
            assert player.stop == stop, words
            said = [user("Hi"), assistant("<think>secret</think>Hi"), user("Well?")]
            shown = player.sampler.get_tokenizer().decode(player.renderer.start(said))
            assert ("secret" in shown) == keeps, words
    run.close()


async def test_the_strings_that_end_the_policys_replies_end_its_opponents() -> None:
    class Asked(ScriptedSampler):
        def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
            stops.append(request.sampling_params.stop)
            return super().submit(request)

    stops: list[object] = []
    renderer = get_renderer(_tokenizer())
    for stop in (("\n",), ()):
        player = SamplerOpponent(name="self", sampler=Asked([[1, 2]]), renderer=renderer, stop=stop)
        await player.reply(cast(Any, None), [user("Hi")], 0)
    assert stops == [["\n"], None]


async def _who_plays(world: World, task: Task) -> str:
    env = world.make_env(task, 0)
    await env.start()
    return (await env.step(assistant("Hello."))).labels["opponent"]


def _trained(service: ServiceClient, seed: int) -> Any:
    """A sampler whose adapter has learned something, so that it differs from the base."""
    trainer = service.create_lora_training_client("tiny", rank=4, seed=seed)
    ids = trainer.get_tokenizer().encode(f"learn {seed} " * 6)
    inputs = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
    for _ in range(4):
        trainer.forward_backward([Datum(ModelInput.from_ints(ids[:-1]), inputs)], "cross_entropy")  # type: ignore[arg-type]
        trainer.optim_step(AdamParams(learning_rate=0.05)).result()
    return trainer.save_weights_and_get_sampling_client()


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(fetch_model("tiny").directory)
