"""`kill -9` under a client that keeps asking: nothing that was accepted is lost, and nothing is done twice."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from service_process import ServerProcess
from turnwise.trajectory import trajectory_from_json

STEPS = 12
DEADLINE_S = 120.0
TOKENS = [5, 6, 7, 8, 9, 10, 11]


class Patient:
    """A client that sends the same request again until it is answered, as the SDKs do."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._until = time.monotonic() + DEADLINE_S
        self._http = httpx2.Client(timeout=120)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        while time.monotonic() < self._until:
            try:
                answer = self._http.post(f"{self._server.url}/api/v1{path}", json=body)
            except httpx2.TransportError:
                time.sleep(0.1)  # the server is down: the network edge is where waiting belongs
                continue
            if answer.status_code == 408:
                continue
            assert answer.status_code == 200, answer.text
            return answer.json()
        raise AssertionError(f"{path} was not answered in {DEADLINE_S} s")

    def result(self, promise: dict[str, Any]) -> dict[str, Any]:
        outcome = self.post("/retrieve_future", {"request_id": promise["request_id"]})
        assert "error" not in outcome, outcome
        return outcome

    def close(self) -> None:
        self._http.close()


def train(client: Patient) -> list[tuple[float, float]]:
    """(loss, steps taken) of every step of one training client."""
    session = client.post("/create_session", {})["session_id"]
    lora = {"rank": 4, "seed": 3}
    model = client.post(
        "/create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
    )["model_id"]
    datum = {
        "model_input": {"chunks": [{"tokens": TOKENS[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": TOKENS[1:], "dtype": "int64"},
            "weights": {"data": [1.0] * 6},
        },
    }
    history = []
    for step in range(STEPS):
        inputs = {"data": [datum], "loss_fn": "cross_entropy"}
        output = client.post(
            "/forward_backward", {"model_id": model, "seq_id": 2 * step + 1, "forward_backward_input": inputs}
        )
        adam = {"learning_rate": 1e-2}
        taken = client.post("/optim_step", {"model_id": model, "seq_id": 2 * step + 2, "adam_params": adam})
        loss = client.result(output)["metrics"]["loss:sum"]
        history.append((loss, client.result(taken)["metrics"]["optimizer_step"]))
    return history


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_dir")
def test_a_client_does_not_notice_that_the_server_was_killed(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "a", "--autosave", "3") as server:
        client = Patient(server)
        expected = train(client)
        client.close()
    moments = random.Random(7)
    with ServerProcess(tmp_path / "b", "--autosave", "3") as server:
        client = Patient(server)
        found: list[tuple[float, float]] = []
        thread = threading.Thread(target=lambda: found.extend(train(client)))
        thread.start()
        for _ in range(3):
            thread.join(moments.uniform(0.02, 0.3))
            server.kill()
            server.start()
        thread.join(DEADLINE_S)
        client.close()
    assert [steps for _, steps in found] == list(range(1, STEPS + 1)), "each step once, in order"
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny_dir")
def test_a_captured_agent_does_not_notice_that_the_server_was_killed(tmp_path: Path) -> None:
    """Every reply that the agent heard is a turn of its capture, once, whenever the server was killed."""
    heard: list[str] = []

    def agent(base_url: str) -> None:
        client = openai.OpenAI(base_url=base_url, api_key="none", max_retries=100, timeout=DEADLINE_S)
        messages: list[Any] = [{"role": "user", "content": "Say a number."}]
        for _ in range(STEPS):
            said = client.chat.completions.create(model="tiny", messages=messages, max_tokens=16).choices[0].message
            heard.append(said.content or "")
            messages += [said, {"role": "user", "content": "And another."}]

    moments = random.Random(7)
    with ServerProcess(tmp_path / "served") as server:
        capture = httpx2.post(f"{server.url}/v1/captures", json={"model": "tiny"}).json()
        thread = threading.Thread(target=agent, args=(capture["base_url"],))
        thread.start()
        for _ in range(2):
            thread.join(moments.uniform(0.02, 0.3))
            server.kill()
            server.start()
        thread.join(DEADLINE_S)
        answer = httpx2.get(f"{server.url}/v1/captures/{capture['id']}").json()
    trajectory = trajectory_from_json(answer["trajectory"])
    assert len(heard) == STEPS
    assert [turn.reply.content.strip() for turn in trajectory.turns] == [text.strip() for text in heard]
    for before, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
        known = (*before.prompt_ids, *before.sampled_ids)
        assert after.prompt_ids[: len(known)] == known, "the next prompt goes on in the sampled ids"
