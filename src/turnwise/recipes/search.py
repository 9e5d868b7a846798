"""An agent that searches before it answers, with the retriever and a judge in the same process.

    python -m turnwise.recipes.search                            # tiny: shows the way in a minute, learns little
    python -m turnwise.recipes.search --model smollm2 --steps 20
    python -m turnwise.recipes.search --judge                    # right answers are also scored by the base model

A few scripted dialogues show the form, then groups of attempts are compared with each other. What the retriever says is
in the prompt and never in the loss. The judge reads finished attempts only where the answer was right, and its score is
a reward channel of its own; where it gives none, the attempt is scored without it.
`turnwise train search` does the same with checkpoints, evaluation and a log.
"""

import argparse
import asyncio
import random

import turnwise
from turnwise import types
from turnwise.credit.advantages import center_by_group
from turnwise.credit.datums import dialogue_to_datums, trajectory_to_datums
from turnwise.envs.registry import get_world
from turnwise.judges import Judge, JudgeLimits, Rubric, SamplerModel, judged
from turnwise.renderers.choose import get_renderer
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.rollout import RolloutConfig, play_groups

GROUP_SIZE = 8
TASKS_PER_STEP = 4
STOPS = ("</search>", "</answer>")  # a tag that is closed ends the reply: what would follow is not read anyway


def make_judged(world, service, model):
    """The same world; a right answer earns up to 0.2 more, by the opinion of the model that training began with."""
    sampler = service.create_sampling_client(base_model=model)
    renderer = get_renderer(sampler.get_tokenizer())
    rubric = Rubric(criteria="A good attempt searches once and answers in one or two words.")
    opinion = SamplerModel(sampler=sampler, renderer=renderer, name=model, max_tokens=48)
    return judged(world, Judge(opinion, rubric, limits=JudgeLimits(fallback="skip", max_tries=1)), weight=0.2)


async def warm_up(trainer, renderer, world, steps, learning_rate):
    """Supervised steps on scripted dialogues; only the assistant's tokens count."""
    dialogues = world.demonstrations(4 * steps, seed=0)
    for step in range(steps):
        turns = [dialogue_to_turns(renderer, dialogue) for dialogue in dialogues[4 * step : 4 * step + 4]]
        pairs = [[(turn.prompt_ids, turn.reply_ids) for turn in dialogue] for dialogue in turns]
        await trainer.forward_backward_async(
            [datum for dialogue in pairs for datum in dialogue_to_datums(dialogue)], "cross_entropy"
        )
        await trainer.optim_step_async(types.AdamParams(learning_rate=learning_rate))


def groups_to_datums(groups):
    """Each attempt by how much better it did than the others at its question; equal groups teach nothing."""
    datums = []
    for group in groups:
        advantages = center_by_group(group.rewards)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            if advantage:
                datums += trajectory_to_datums(trajectory, [float(advantage)] * len(trajectory.turns))
    return datums


def describe(result):
    metrics = result.stats.metrics()
    parts = {name: metrics.get(f"rollout/{name}", 0.0) for name in ("success_mean", "reward_mean", "reward_judge_mean")}
    return "  ".join(f"{name} {value:.3f}" for name, value in parts.items())


async def run(options, service):
    trainer = service.create_lora_training_client(options.model, rank=16, seed=options.seed)
    renderer = get_renderer(trainer.get_tokenizer())
    world = get_world("search", kind="one_hop", max_turns=3)
    if options.judge:
        world = make_judged(world, service, options.model)
    config = RolloutConfig(max_trajectory_tokens=1000, group_size=GROUP_SIZE, stop=STOPS)
    held_out = RolloutConfig(max_trajectory_tokens=1000, group_size=1, min_group_size=1, stop=STOPS)

    await warm_up(trainer, renderer, world, options.warmup, learning_rate=1e-3)
    tasks, test_tasks = world.tasks("train", 256, options.seed), world.tasks("test", options.eval_tasks, options.seed)
    rng = random.Random(options.seed)
    sampler = await trainer.save_weights_and_get_sampling_client_async()
    print("held out, before:", describe(await play_groups(world, test_tasks, sampler, renderer, held_out, seed=1)))
    for step in range(options.steps):
        batch = rng.sample(tasks, TASKS_PER_STEP)
        result = await play_groups(world, batch, sampler, renderer, config, seed=1000 + step)
        datums = groups_to_datums(result.groups)
        if datums:
            await trainer.forward_backward_async(datums, "importance_sampling")
            await trainer.optim_step_async(types.AdamParams(learning_rate=2e-4, grad_clip_norm=1.0))
            sampler = await trainer.save_weights_and_get_sampling_client_async()
        print(f"step {step + 1:3}  {describe(result)}", flush=True)
    print("held out, after: ", describe(await play_groups(world, test_tasks, sampler, renderer, held_out, seed=1)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model of the store, the hub or a directory")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4, help="supervised steps before")
    parser.add_argument("--eval-tasks", type=int, default=32)
    parser.add_argument("--judge", action="store_true", help="let the base model score right answers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    service = turnwise.ServiceClient()
    try:
        asyncio.run(run(options, service))
    finally:
        service.close()


if __name__ == "__main__":
    main()
