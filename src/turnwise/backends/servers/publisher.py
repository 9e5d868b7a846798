"""Publishes a trainer's adapter to servers that sample.

Every publication is a directory of PEFT files of its own, under `served/` in the run's directory. Its name is the
adapter's name on the servers; no other publication, process or run uses it, so a server that outlives a run never mixes
two of them up. A publication is unloaded and deleted when nobody holds its client any more: attempts that keep old
weights are served to their end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import time
import uuid
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turnwise.backends import BackendSetup, Publisher
from turnwise.backends.servers.dialect import ServedWeights, ServerDialect, ServerFacts
from turnwise.backends.servers.fleet import Fleet, Revive
from turnwise.backends.servers.fleet_figures import FleetStats, FleetTimes
from turnwise.backends.servers.gpus import choose_server_gpus, visible_gpus
from turnwise.backends.servers.http import KEY_VARIABLE
from turnwise.backends.servers.launch import OwnSampler, OwnServer, ServerCommand
from turnwise.backends.servers.probe import ModelProbe
from turnwise.backends.servers.served_files import copy_files, read_rank
from turnwise.client.base import SamplingClient, TrainingClient, prompt_tokens
from turnwise.client.checkpoints import CheckpointStore, remove_directory, write_directory
from turnwise.client.futures import ApiFuture
from turnwise.client.local_clients import LocalTrainingClient
from turnwise.client.shared_weights import SharedWeights
from turnwise.errors import CheckpointError, ConfigError, DataError, ServiceError
from turnwise.models.facts import is_tied, read_facts
from turnwise.models.tokenizer import load_tokenizer
from turnwise.runtime.background_loop import BackgroundLoop
from turnwise.types import ModelInput, SampledSequence, SampleRequest, SampleResponse

PREFIX = "turnwise"
SERVED = "served"
"""The folder of the run's directory that holds what the servers have loaded."""
CLOSE_S = 10.0
"""How long unloading may take at the end of a run, in all."""


class FleetSamplingClient(SamplingClient):
    """Samples from one publication on the servers. While a client is in use, the servers keep its publication."""

    def __init__(self, publisher: FleetPublisher, fleet: Fleet, loop: BackgroundLoop, weights: ServedWeights) -> None:
        """Do not call this; use `Publisher.publish`."""
        self._model_directory = publisher.setup.model_directory
        self._draws_alternatives = publisher.draws_alternatives
        self._fleet = fleet
        self._loop = loop
        self.weights = weights

    def submit(self, request: SampleRequest) -> ApiFuture[SampleResponse]:
        """Begin to sample. Cancelling the future ends the request on the server."""
        if request.prompt_alt_tokens_k and not self._draws_alternatives:
            raise DataError(
                "prompt_alt_tokens_k: servers draw no alternatives to prompt tokens; rollout.backend=local does"
            )
        future = self._loop.submit(self._generate(request))
        what = f"sample of {request.num_samples} from a prompt of {len(request.prompt)} tokens on servers"
        return ApiFuture(future, what, on_abandoned=future.cancel)

    def compute_logprobs(self, prompt: ModelInput) -> ApiFuture[list[float | None]]:
        """Compute the logprob of each prompt token. The first one gets None, because nothing predicts it."""
        return self.submit(SampleRequest.scoring(prompt_tokens(prompt))).then(_prompt_logprobs)

    def get_tokenizer(self) -> Any:
        """Return the base model's transformers tokenizer."""
        return load_tokenizer(self._model_directory)

    def get_base_model(self) -> str:
        return str(self._model_directory)

    async def _generate(self, request: SampleRequest) -> SampleResponse:
        # A method, so that a request under way holds this client, and with it the publication.
        return await self._fleet.generate(request, self.weights)


class FleetPublisher(Publisher):
    """Publishes to a fleet. A subclass says which servers it has, how to talk to them, and how to start one again."""

    setup: BackendSetup
    draws_alternatives = False
    """Whether its servers can draw alternatives to the tokens of a prompt."""

    def __init__(self, setup: BackendSetup) -> None:
        super().__init__(setup)
        self._loop: BackgroundLoop | None = None
        self._fleet: Fleet | None = None
        self._served = setup.run_directory / SERVED
        self._name = f"{PREFIX}-{uuid.uuid4().hex[:10]}"
        self._numbers = itertools.count()
        self._published: dict[str, ServedWeights] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._is_checked = False
        """Whether the servers' model was compared with the trainer's."""
        self._probe = ModelProbe(setup.model_directory, setup.rollout.max_trajectory_tokens)
        self._publish_s = 0.0
        self._newest_whole: Path | None = None
        self._newest_shared: SharedWeights | None = None
        self._stats_before = FleetStats()

    @abstractmethod
    def make_dialect(self, url: str) -> ServerDialect:
        """Make what talks to the server at this address; called in the event loop that will use it."""

    @property
    def blank_directory(self) -> Path:
        """The directory for an adapter that changes nothing, which the servers may load."""
        return self._served / f"{self._name}-blank"

    @abstractmethod
    async def start_servers(self) -> Sequence[str]:
        """Start what the fleet needs. Returns the addresses, for `make_dialect`."""

    async def stop_servers(self) -> None:
        """Stop what was started."""
        return

    def find_reviver(self) -> Revive | None:
        """What starts the server at an address again, and says whether it did; None: they are not ours to start."""
        return None

    def fleet_times(self) -> FleetTimes:
        """The deadlines of the fleet; asked when the servers have started."""
        rollout = self.setup.rollout
        times = FleetTimes(request_s=rollout.reply_deadline_s, wait_s=rollout.server_wait_s)
        if rollout.publish == "adapter":
            return times
        # A server reads whole weights for as long as when it starts, and with `end` it finishes its replies first.
        replies_s = times.request_s if rollout.kv_across_updates == "end" else 0.0
        return replace(times, load_s=max(times.load_s, rollout.server_start_s) + replies_s)

    def check_facts(self, url: str, facts: ServerFacts) -> None:
        """Refuse a server whose model cannot be the run's, or is not the one that it had before."""
        model, wanted = read_facts(self.setup.model_directory), self.setup.rollout.max_trajectory_tokens
        if facts.vocabulary is not None and facts.vocabulary != model.vocab_size:
            raise ConfigError(
                f"the server at {url} serves {facts.model} with {facts.vocabulary} tokens in its vocabulary; the run's "
                f"model {self.setup.model_directory} has {model.vocab_size}. Start the server with the run's model"
            )
        if facts.context_length is not None and facts.context_length < wanted:
            raise ConfigError(
                f"the server at {url} reads at most {facts.context_length} tokens, and attempts may have {wanted} "
                "(rollout.max_trajectory_tokens); start it with a longer context, or lower the option"
            )
        if self.setup.rollout.url:  # a server of our own may read newer weights elsewhere
            self._probe.check_name(url, facts.model)

    async def deliver(self, trainer: TrainingClient, version: int) -> SamplingClient:
        is_whole = self.setup.rollout.publish == "weights"
        if self.setup.weight_transfer == "ipc":
            return await self._deliver_shared(trainer, version)
        if not is_whole:
            await self._open()
        name = self._new_name(version)
        try:
            saved = await trainer.save_weights_for_sampler(name)
            adapter = await asyncio.to_thread(self._take_files, saved.path, name)
            if is_whole:
                await asyncio.to_thread(self._merge, adapter)
        except (OSError, CheckpointError) as cause:
            raise CheckpointError(f"{self._not_written(version)}: {cause}") from cause
        except Exception as cause:
            if "I/O error" in str(cause):  # safetensors reports a full disk with an error of its own
                raise CheckpointError(f"{self._not_written(version)}: {cause}") from cause
            raise
        if is_whole:
            self._newest_whole = adapter
            await self._open()
        weights = ServedWeights(version=version, adapter=adapter, is_whole=is_whole)
        return await self._publish_checked(trainer, weights)

    async def _deliver_shared(self, trainer: TrainingClient, version: int) -> SamplingClient:
        """Have the servers read the whole weights in the trainer's memory. Nothing is written."""
        if not isinstance(trainer, LocalTrainingClient):
            raise ConfigError(
                f"rollout.weight_transfer=ipc needs the trainer in this process, and {type(trainer).__name__} has it "
                "elsewhere; use rollout.weight_transfer=disk"
            )
        shared = await trainer.share_weights()
        await self._open()
        place = self._served / self._new_name(version)
        weights = ServedWeights(version=version, adapter=place, is_whole=True, shared=shared)
        before = self._newest_shared
        client = await self._publish_checked(trainer, weights)
        self._newest_shared = shared
        if before is not None:
            before.release()  # servers that come back ask for the newest weights alone
        return client

    async def deliver_files(self, adapter: Path | None, version: int) -> SamplingClient:
        if self.setup.rollout.publish == "weights" and self.setup.rollout.url:
            raise ConfigError(
                f"rollout.publish=weights would replace the weights of the servers at {self.setup.rollout.url[0]}, "
                "which a run may be using; set rollout.url= to start a server, or rollout.backend=local"
            )
        weights = ServedWeights(version=version)
        if adapter is not None:
            is_whole = self.setup.rollout.publish == "weights"
            weights = replace(weights, adapter=self._served / self._new_name(version), is_whole=is_whole)
            await asyncio.to_thread(self._write_files, adapter, weights)
        await self._open()
        client = await self._publish(weights)
        if self.setup.rollout.url:
            await self._check_files(client, adapter)
        return client

    def _write_files(self, adapter: Path, weights: ServedWeights) -> None:
        """Put files where the servers read them: an adapter's, or those of the whole model."""
        assert weights.adapter is not None
        try:
            write_directory(weights.adapter, functools.partial(copy_files, adapter))
            if weights.is_whole:
                self._merge(weights.adapter)
                self._newest_whole = weights.adapter
        except OSError as cause:
            raise CheckpointError(f"{self._not_written(weights.version)}: {cause}") from cause

    async def rest(self) -> None:
        if self._fleet is not None and self._loop is not None and self.setup.rollout.placement == "colocated":
            await self._loop.run(self._fleet.rest())

    def take_metrics(self) -> dict[str, float]:
        fleet = self._fleet
        if fleet is None:
            return {}
        now, before = replace(fleet.stats), self._stats_before
        self._stats_before = now
        state = {"fleet/servers_ready": float(fleet.num_ready), "fleet/load_s": self._publish_s}
        return now.since(before) | state

    async def close(self) -> None:
        """Unload what this process published, and stop the servers that it started."""
        loop, fleet = self._loop, self._fleet
        self._loop = self._fleet = self._newest_shared = None
        self._probe.take(None)
        try:
            if loop is not None and fleet is not None:
                await loop.run(self._unload_all(fleet))
        finally:
            if loop is not None:
                await asyncio.to_thread(loop.close)
            await self.stop_servers()
            await asyncio.to_thread(remove_directory, self.blank_directory)
            with contextlib.suppress(OSError):  # what could not be unloaded stays, for a process that resumes the run
                self._served.rmdir()

    async def _open(self) -> None:
        """Start everything, at the first publication."""
        if self._fleet is not None:
            return
        addresses = await self.start_servers()
        self._loop = BackgroundLoop("turnwise fleet")
        self._fleet = await self._loop.run(self._start_fleet(addresses))

    async def _start_fleet(self, addresses: Sequence[str]) -> Fleet:
        dialects = [self.make_dialect(url) for url in addresses]
        times, reviver = self.fleet_times(), self.find_reviver()
        fleet = Fleet(dialects, times=times, check_facts=self.check_facts, probe=self._probe, revive=reviver)
        try:
            await fleet.start()
        except BaseException:
            await fleet.close()
            raise
        for left in self._leftovers():
            await fleet.retire(ServedWeights(version=-1, adapter=left))
            await asyncio.to_thread(remove_directory, left)
        return fleet

    def _leftovers(self) -> list[Path]:
        """Publications of a process that died in this run; the servers may still hold them."""
        found = sorted(self._served.glob(f"{PREFIX}-*")) if self._served.is_dir() else []
        return [place for place in found if not place.name.startswith(f"{self._name}-")]

    def _new_name(self, version: int) -> str:
        return f"{self._name}-v{version}-{next(self._numbers)}"

    def _take_files(self, path: str, name: str) -> Path:
        """Move the files that the trainer saved to where the servers read them."""
        saved, place = CheckpointStore(self.setup.run_directory).directory(path), self._served / name
        if not saved.is_dir():
            raise CheckpointError(
                f"the trainer saved {path}, and {saved} is not there; a trainer that keeps its files elsewhere "
                "cannot publish to servers"
            )
        place.parent.mkdir(parents=True, exist_ok=True)
        saved.rename(place)
        return place

    def _merge(self, directory: Path) -> None:
        """Turn an adapter's files into those of the whole model; what is a whole model already stays."""
        from turnwise.engine.model.merge import write_merged
        from turnwise.engine.training.full_files import is_full

        if is_full(directory):
            return
        base, merged = self.setup.model_directory, directory.with_name(f".{directory.name}")
        try:
            write_merged(directory, base, merged)
        except BaseException:
            for left in (directory, merged):
                remove_directory(left)
            raise
        if self.setup.rollout.url and is_tied(base) and not is_tied(merged):
            raise ConfigError(
                f"{base} shares its output head with its embedding, and the adapter changes the head alone; a server "
                "that was started with that model cannot take it. Set model.train_unembed=false, or rollout.publish="
                "adapter, or let the run start its server"
            )
        remove_directory(directory)
        merged.rename(directory)

    def _not_written(self, version: int) -> str:
        return f"the adapter of version {version} could not be written under {self.setup.run_directory}"

    async def _publish_checked(self, trainer: TrainingClient, weights: ServedWeights) -> FleetSamplingClient:
        """Publish, and refuse servers with another model: all at the first publication, and one that joins later or
        comes back when it does."""
        if self.setup.rollout.url:
            self._probe.take(trainer)
        client = await self._publish(weights)
        if not self._is_checked:
            await self._check_model(trainer, client.weights)
            self._is_checked = True
        return client

    async def _check_model(self, trainer: TrainingClient, weights: ServedWeights) -> None:
        for url, sequence in (await self._draw_on_each(trainer.get_tokenizer(), weights))[1].items():
            await self._probe.compare_with(trainer, url, sequence)

    async def _check_files(self, client: FleetSamplingClient, adapter: Path | None) -> None:
        """The same check where nothing is trained, because it must be certain which model is measured. It loads the
        model here too, so it runs only if the server's model has another name."""
        wanted = self.setup.model_directory.resolve().name.lower()
        if all(Path(name).name.lower() == wanted for name in self._probe.models.values()):
            return
        service, model = self.setup.service, str(self.setup.model_directory)
        if service is None:
            return
        here = service.create_sampling_client_async
        local = await (here(base_model=model) if adapter is None else here(model_path=str(adapter)))
        prompt, drawn = await self._draw_on_each(client.get_tokenizer(), client.weights)
        for url, sequence in drawn.items():
            ids = ModelInput.from_ints([*prompt, *sequence.tokens])
            expected = await local.compute_logprobs_async(ids)
            self._probe.compare(url, sequence, expected[len(prompt) :])

    async def _draw_on_each(
        self, tokenizer: Any, weights: ServedWeights
    ) -> tuple[list[int], dict[str, SampledSequence]]:
        """A prompt, and what each server replies."""
        assert self._loop is not None
        assert self._fleet is not None
        request = self._probe.request_by(tokenizer)
        return list(map(int, request.prompt)), await self._loop.run(self._fleet.draw_on_each(request, weights))

    async def _publish(self, weights: ServedWeights) -> FleetSamplingClient:
        loop, fleet = self._loop, self._fleet
        assert loop is not None
        assert fleet is not None
        started_s = time.perf_counter()
        try:
            await loop.run(fleet.publish(weights))
        except BaseException:
            if weights.name is not None:  # some servers may have it already, and nobody will ask for it
                await loop.run(self._retire(fleet, weights))
            raise
        self._publish_s = time.perf_counter() - started_s
        client = FleetSamplingClient(self, fleet, loop, weights)
        if weights.name is not None:
            self._published[weights.name] = weights
            # The garbage collector may call this in any thread, so the work itself is done in the fleet's.
            weakref.finalize(client, loop.post, functools.partial(self._begin_retiring, weights)).atexit = False
        return client

    def _begin_retiring(self, weights: ServedWeights) -> None:
        if self._fleet is not None:
            task = asyncio.get_running_loop().create_task(self._retire(self._fleet, weights))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def _retire(self, fleet: Fleet, weights: ServedWeights) -> None:
        assert weights.name is not None
        assert weights.adapter is not None
        self._published.pop(weights.name, None)
        await fleet.retire(weights)
        await asyncio.to_thread(remove_directory, weights.adapter)

    async def _unload_all(self, fleet: Fleet) -> None:
        """Leave servers that go on without this run as they were."""
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*list(self._retiring))
                for weights in list(self._published.values()):
                    await self._retire(fleet, weights)
        except TimeoutError:
            pass  # a run that goes on with these servers unloads what is left
        finally:
            await fleet.close()


class ServerPublisher(FleetPublisher):
    """Samples on one server or several. A backend says how its servers are spoken to, and how one is started."""

    def __init__(self, setup: BackendSetup) -> None:
        super().__init__(setup)
        self._own: OwnSampler | None = None
        self._start_s = 0.0
        self.largest_rank = setup.lora_rank
        """The largest rank of an adapter that a server of our own has to take."""

    @abstractmethod
    def server_command(self) -> ServerCommand:
        """How a server of the run's own is started, where `rollout.url` is empty."""

    async def deliver_files(self, adapter: Path | None, version: int) -> SamplingClient:
        if adapter is not None and self.setup.rollout.publish == "adapter":
            self.largest_rank = max(self.largest_rank, read_rank(adapter))
        return await super().deliver_files(adapter, version)

    def make_own(self) -> OwnSampler:
        """What samples where `rollout.url` is empty: a server that this run starts."""
        command = self.server_command()
        log = self.setup.run_directory / f"{command.name.lower()}.log"
        return OwnServer(command, log, start_s=self.setup.rollout.server_start_s)

    def gpu_variables(self) -> dict[str, str]:
        """The variables that show a server of our own its GPUs; without a trainer it takes the first ones."""
        setup = self.setup
        if setup.service is not None:
            return {}
        return visible_gpus(choose_server_gpus(setup.engine, setup.cluster, setup.rollout))

    @property
    def start_directory(self) -> Path:
        """What a server of our own is started with: the base model, or the newest whole weights."""
        return self._newest_whole or self.setup.model_directory

    @property
    def server_key(self) -> str:
        """The API key of servers with an address; one of our own has none."""
        return os.environ.get(KEY_VARIABLE, "") if self.setup.rollout.url else ""

    async def start_servers(self) -> Sequence[str]:
        return self.setup.rollout.url or (await self._start_own(),)

    async def stop_servers(self) -> None:
        if self._own is not None:
            await self._own.stop()

    def find_reviver(self) -> Revive | None:
        return None if self._own is None else self._revive_own

    def fleet_times(self) -> FleetTimes:
        times = super().fleet_times()
        if self._own is None:
            return times
        # A server of our own that died takes as long as before to start again.
        return replace(times, wait_s=max(times.wait_s, 2 * self._start_s + 30))

    async def _start_own(self) -> str:
        self._own = self.make_own()
        started_s = time.monotonic()
        await self._own.start()
        self._start_s = time.monotonic() - started_s
        return self._own.url

    async def _revive_own(self, _url: str, is_stuck: bool) -> bool:
        assert self._own is not None
        return await self._own.revive(is_stuck=is_stuck)


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    if response.prompt_logprobs is None:
        raise ServiceError("the server returned no logprobs of the prompt")
    return list(response.prompt_logprobs)
