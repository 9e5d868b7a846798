"""Clients of the real tinker SDK under load; runs in the SDK's own environment, driven by `service_load.py`.

Each client has a session, an adapter and a thread of its own, trains the same datums in the same order, and samples
from what it trained every few steps. It prints one JSON line per client with everything it was told by the server. The
process says `ready` when every client has its adapter, starts when it is sent a line, and stops after its time, after
its steps, or when it is sent `stop`.
"""

import argparse
import json
import os
import random
import sys
import threading
import time
import traceback
import warnings

import tinker
from tinker import types

RATE = 1e-2
STOP = threading.Event()


def datum_of(step):
    """The datum of a step: the same for every client, and another one in the next step."""
    tokens = [random.Random(step).randrange(5, 200) for _ in range(17)]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * 16},
    )


class Client:
    """One user: a session, a training client, and samplers made from it."""

    def __init__(self, index, options):
        self.index = index
        self.options = options
        self.service = tinker.ServiceClient(user_metadata={"client": str(index)})
        self.training = self.service.create_lora_training_client(options.model, rank=options.rank, seed=1)
        self.losses, self.counts, self.step_s = [], [], []
        self.num_samples = 0
        self.saved = {}
        self.error = None

    def run(self):
        try:
            until = time.monotonic() + self.options.seconds
            while time.monotonic() < until and len(self.losses) < self.options.max_steps and not STOP.is_set():
                self.step()
        except BaseException:  # noqa: BLE001 - whatever a client ends with is reported
            self.error = traceback.format_exc()

    def step(self):
        started = time.monotonic()
        step = len(self.losses)
        output = self.training.forward_backward([datum_of(step)], "cross_entropy")
        taken = self.training.optim_step(types.AdamParams(learning_rate=RATE))
        self.losses.append(output.result().metrics["loss:sum"])
        self.counts.append(int(taken.result().metrics["optimizer_step"]))
        if self.options.sample_every and step % self.options.sample_every == 0:
            self.sample()
        if self.options.save_every and step % self.options.save_every == 0:
            self.saved[step + 1] = self.training.save_state(f"step-{step + 1}").result().path
        self.step_s.append(time.monotonic() - started)

    def sample(self):
        sampler = self.training.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=8, temperature=1.0)
        found = sampler.sample(types.ModelInput.from_ints([5, 6, 7, 8]), 2, params).result()
        for sequence in found.sequences:
            assert 1 <= len(sequence.tokens) <= 8, sequence
            assert len(sequence.tokens) == len(sequence.logprobs), sequence
        self.num_samples += len(found.sequences)

    def report(self):
        return {
            "client": self.index,
            "losses": self.losses,
            "counts": self.counts,
            "num_samples": self.num_samples,
            "saved": self.saved,
            "slowest_step_s": max(self.step_s, default=0.0),
            "error": self.error,
        }


def wait_for_stop():
    for line in sys.stdin:
        if line == "stop\n":
            STOP.set()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="index of the first client")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--max-steps", type=int, default=10**9)
    parser.add_argument("--sample-every", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--rank", type=int, default=4)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    clients = [Client(options.first + index, options) for index in range(options.clients)]
    print("ready", flush=True)
    sys.stdin.readline()
    threads = [threading.Thread(target=client.run) for client in clients]
    for thread in threads:
        thread.start()
    threading.Thread(target=wait_for_stop, daemon=True).start()
    for thread in threads:
        thread.join()
    for client in clients:
        print(json.dumps(client.report()), flush=True)
    os._exit(0)  # the SDK's threads would hold the process for seconds


if __name__ == "__main__":
    main()
