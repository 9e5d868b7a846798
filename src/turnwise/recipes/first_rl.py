"""Reinforcement learning from prompt to gradient, with nothing but the clients.

    python -m turnwise.recipes.first_rl                     # a random two-layer model, under a minute on a CPU
    python -m turnwise.recipes.first_rl --model smollm2 --steps 10

The model is asked for a digit above, or below, a given one. Nobody shows it an answer: it is only told which of its
own tries were right. That is enough, because tries differ. What a random model finds first is the laziest policy that
pays, "9 when the question says above, 0 when it says below", and RL is content with it: you get what you reward.

This file is for reading. It writes its own loop, so that every step from a question to a gradient can be seen; your own
program calls `turnwise.train`, as the other recipes do.
"""

import argparse
import random
import time

import turnwise
from turnwise import types

GROUP_SIZE = 32  # tries per prompt: a model that is right once in a hundred needs many to be right once
ENTROPY_COEF = 0.05  # pays for staying undecided: without it the first digit that works is all the model ever tries
HELD_OUT = (3, 6)  # questions about these digits are never trained on


def make_tasks(digits):
    """Questions, each with the set of its right answers."""
    tasks = []
    for n in digits:
        above, below = {str(d) for d in range(n + 1, 10)}, {str(d) for d in range(n)}
        for word, answers in (("above", above), ("below", below)):
            if answers:  # nothing is below 0 or above 9
                tasks.append((f"Q: Please name one digit that is {word} {n}.\nA: ", answers))
    return tasks


def sample_groups(sampler, tokenizer, tasks, num_samples, rng):
    """A group of tries for every task. All prompts are under way before the first is waited for: the engine decodes
    them in one batch, and reads each prompt once for its whole group."""
    # One token is the whole answer here. Temperature 1 is the model's own distribution, which is what we train.
    futures = [
        sampler.sample(
            types.ModelInput.from_ints(tokenizer.encode(question)),
            num_samples=num_samples,
            sampling_params=types.SamplingParams(max_tokens=1, temperature=1.0, seed=rng.getrandbits(32)),
        )
        for question, _ in tasks
    ]
    return [future.result(timeout=600).sequences for future in futures]


def is_right(tokenizer, sequence, answers):
    return tokenizer.decode(sequence.tokens).strip() in answers


def success_rate(sampler, tokenizer, tasks, rng):
    groups = sample_groups(sampler, tokenizer, tasks, 64, rng)
    tries = [(sequence, answers) for group, (_, answers) in zip(groups, tasks, strict=True) for sequence in group]
    return sum(is_right(tokenizer, sequence, answers) for sequence, answers in tries) / len(tries)


def make_datum(prompt_ids, sequence, advantage):
    """One try, as the trainer reads it.

    A language model predicts the next token at every position, so targets are the inputs shifted by one:

        input      Q  :  Please ...  A  :  ␣        (all but the last token)
        target     :  Please    ...  :  ␣  9        (all but the first)
        weight     0  0         ...  0  0  1        (learn only what the model itself said)
    """
    ids = prompt_ids + list(sequence.tokens)
    num_before = len(prompt_ids) - 1  # positions whose target is still part of the prompt
    num_sampled = len(sequence.tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "weights": [0.0] * num_before + [1.0] * num_sampled,
            # What the sampler thought of its own tokens: the loss compares it with what the trainer thinks of them.
            "logprobs": [0.0] * num_before + list(sequence.logprobs),
            "advantages": [0.0] * num_before + [advantage] * num_sampled,
        },
    )


def group_to_datums(tokenizer, question, answers, group):
    """GRPO in three lines: a try is good if it did better than the others at the same question."""
    rewards = [float(is_right(tokenizer, sequence, answers)) for sequence in group]
    mean = sum(rewards) / len(rewards)
    advantages = [reward - mean for reward in rewards]  # positive: say it more often; negative: less often
    prompt_ids = tokenizer.encode(question)
    return [make_datum(prompt_ids, seq, adv) for seq, adv in zip(group, advantages, strict=True)], mean


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a model of the store, the hub or a directory")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default 60)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same run (default 0)")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    started = time.monotonic()

    service = turnwise.ServiceClient()
    trainer = service.create_lora_training_client(options.model, rank=32, seed=options.seed)
    tokenizer = trainer.get_tokenizer()
    # Random weights have far to go; a trained model has much to lose.
    adam = types.AdamParams(learning_rate=5e-3 if options.model == "tiny" else 3e-4)
    training = make_tasks(digit for digit in range(10) if digit not in HELD_OUT)
    held_out = make_tasks(HELD_OUT)

    question, answers = held_out[0]
    print(f"prompt    {question!r}\nids       {tokenizer.encode(question)}\nright     {sorted(answers)}")
    # A sampler is a frozen copy of the weights. It does not follow the training: that is why each step makes a new one.
    sampler = trainer.save_weights_and_get_sampling_client()
    before = success_rate(sampler, tokenizer, held_out, rng)
    print(f"success on held-out prompts before: {before:.2f}", flush=True)

    for step in range(options.steps):
        groups = sample_groups(sampler, tokenizer, training, GROUP_SIZE, rng)
        datums, means = [], []
        for (question, answers), group in zip(training, groups, strict=True):
            group_datums, mean = group_to_datums(tokenizer, question, answers, group)
            datums += group_datums
            means.append(mean)
        # Gradients add up until optim_step uses them; the loss is -(trainer/sampler probability) * advantage.
        trainer.forward_backward(datums, "importance_sampling", {"entropy_coef": ENTROPY_COEF}).result(timeout=600)
        trainer.optim_step(adam).result(timeout=600)
        sampler = trainer.save_weights_and_get_sampling_client()
        if (step + 1) % 10 == 0 or step + 1 == options.steps:
            print(f"step {step + 1:3}  reward {sum(means) / len(means):.2f}", flush=True)

    after = success_rate(sampler, tokenizer, held_out, rng)
    print(f"success on held-out prompts after:  {after:.2f}  ({time.monotonic() - started:.0f} s)")
    service.close()


if __name__ == "__main__":
    main()
