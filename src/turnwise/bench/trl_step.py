"""TRL's side of `turnwise bench step`: whole multi-turn GRPO steps with its `GRPOTrainer`, counted in CPU-seconds.

A script for an environment that has TRL: `python trl_step.py LOAD.json RESULT.json`. It imports nothing of turnwise.

TRL plays dialogues through its `rollout_func`: every turn is one `generate` over the dialogues so far, on the model
that is trained, as TRL's own tool loop does it, and tokens of the world are masked with `env_mask`. The rest is its
trainer's.
"""
# pyright: basic

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import trl  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]
from trl.models import unwrap_model_for_generation  # pyright: ignore[reportMissingImports]


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class StepClock(TrainerCallback):
    """Reads both clocks at the end of every step."""

    def __init__(self) -> None:
        self.readings: list[tuple[float, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.readings.append((cpu_seconds(), time.perf_counter()))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.readings.append((cpu_seconds(), time.perf_counter()))


class TrlDialogues:
    """Plays the turns of all dialogues of a step; prompts and the world's tokens come from the load."""

    def __init__(self, load: dict[str, Any]) -> None:
        self.load = load
        self.num_sampled = 0
        self.num_trained = 0

    def play(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        load = self.load
        starts = [load["prompts"][int(prompt)] for prompt in prompts]
        ids = torch.tensor(starts)
        masks = [[] for _ in starts]
        with (
            unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model,
            torch.no_grad(),
        ):
            for turn in range(load["turns"]):
                if turn:
                    ids = torch.cat([ids, torch.tensor(load["observed"][turn][: len(starts)])], dim=1)
                ids = model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=load["new_tokens"],
                    min_new_tokens=load["new_tokens"],
                    pad_token_id=0,
                )
                for mask in masks:
                    mask += [0] * (len(load["observed"][turn][0]) if turn else 0) + [1] * load["new_tokens"]
        size = load["prompt_tokens"]
        self.num_sampled += len(starts) * load["turns"] * load["new_tokens"]
        self.num_trained += ids.numel()
        completions = ids[:, size:].tolist()
        return {"prompt_ids": starts, "completion_ids": completions, "logprobs": None, "env_mask": masks}


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Half of the dialogues are better than the others."""
    return [float(index % 2) for index in range(len(completions))]


def run(load: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    dtype = getattr(torch, load["dtype"])
    model = AutoModelForCausalLM.from_pretrained(load["model"], dtype=dtype)
    dialogues, clock = TrlDialogues(load), StepClock()
    num_dialogues = len(load["prompts"]) * load["group_size"]
    with tempfile.TemporaryDirectory() as place:
        config = GRPOConfig(
            output_dir=place,
            use_cpu=True,
            bf16=False,  # the weights have the dtype of the load; no autocast on top
            gradient_checkpointing=False,
            per_device_train_batch_size=load["micro_batch"],
            gradient_accumulation_steps=num_dialogues // load["micro_batch"],
            num_generations=load["group_size"],
            max_completion_length=load["turns"] * load["new_tokens"] + (load["turns"] - 1) * load["num_observed"],
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-5,
            max_steps=load["warmups"] + load["repeats"],
            save_strategy="no",
            report_to=[],
            logging_steps=1000,
        )
        trainer = GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=rewards,
            train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(len(load["prompts"]))] * 64}),
            processing_class=AutoTokenizer.from_pretrained(load["model"]),
            peft_config=LoraConfig(r=load["rank"], lora_alpha=32, target_modules=load["targets"]),
            callbacks=[clock],
            rollout_func=dialogues.play,
        )
        trainer.train()
    steps = np.diff(np.array(clock.readings), axis=0)[load["warmups"] :]
    count = load["warmups"] + load["repeats"]
    return {
        "version": trl.__version__,
        "cpu_s": float(np.median(steps[:, 0])),
        "wall_s": float(np.median(steps[:, 1])),
        "sampled_tokens": dialogues.num_sampled // count,
        "trained_tokens": dialogues.num_trained // count,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    given, wanted = (Path(argument) for argument in sys.argv[1:3])
    wanted.write_text(json.dumps(run(json.loads(given.read_text(encoding="utf-8")))), encoding="utf-8")
