"""The error tree. A message says what came, what was expected, and what to do.

TurnwiseError
├── ConfigError (ValueError)     a setting that cannot work: raised before anything is spent
│   └── NotSupportedError (NotImplementedError)    options that no backend can combine
├── DataError (ValueError)       a datum, prompt or sampling request that cannot be used: the client goes on working
├── ModelError                   a model that cannot be found, read or supported
│   └── ModelNotFoundError
├── AdapterError                 a single-turn adapter raised, or returned something that cannot be used
├── CodeRunnerError              the code runner failed, not the code that it ran
├── SandboxError                 the sandbox failed, not what ran in it
│   └── SessionClosedError       a sandbox session that was closed, or whose lease ran out
├── AttemptFailed                one party outside our code failed an attempt: recorded, its siblings go on
├── CheckpointError              a checkpoint that is missing, damaged or made for another base model
├── EngineStoppedError           the engine was closed, or died, while a request was waiting for it
│   └── LearnerError             one of several learner processes died, failed or did not answer
│       └── LearnerLostError     one is gone or silent: others can take its place
└── ServiceError                 a service elsewhere cannot be reached, refused a request, or failed it
"""

from collections.abc import Mapping
from enum import StrEnum


class TurnwiseError(Exception):
    """Root of everything that turnwise raises on purpose."""


class ConfigError(TurnwiseError, ValueError):
    """A setting that cannot work."""


class NotSupportedError(ConfigError, NotImplementedError):
    """Options that no backend can combine; code that was written for SkyRL catches it as a NotImplementedError."""


class DataError(TurnwiseError, ValueError):
    """A datum, prompt or sampling request that cannot be used."""


class ModelError(TurnwiseError):
    """A model that cannot be found, read or supported."""


class ModelNotFoundError(ModelError):
    """No model under that name; the message lists what was tried."""


class CheckpointError(TurnwiseError):
    """A checkpoint that is missing, damaged or made for another base model."""


class EngineStoppedError(TurnwiseError):
    """The engine was closed, or died, while a request was waiting for it."""


class LearnerError(EngineStoppedError):
    """One of several learner processes died, failed or did not answer; the others cannot go on without it."""


class LearnerLostError(LearnerError):
    """A learner process is gone, or does not answer; it failed no call, so that the call can be made again."""


class ServiceError(TurnwiseError):
    """A service elsewhere cannot be reached, refused a request, or failed it."""


class AdapterError(TurnwiseError):
    """An adapter raised, or returned something that cannot be used; the message names the sample."""


class CodeRunnerError(TurnwiseError):
    """The runner failed, not the code: nothing is known about the response, so it gets no score."""


class SandboxError(TurnwiseError):
    """The sandbox failed, not the program: nothing is known about the program, so it gets no score."""


class SessionClosedError(SandboxError):
    """A sandbox session that was closed, or whose lease ran out."""


class Party(StrEnum):
    """Who an attempt depends on; the one to blame when it fails."""

    ENV = "env"
    TOOL = "tool"
    SAMPLER = "sampler"
    RENDERER = "renderer"
    JUDGE = "judge"
    REWARD = "reward"
    """A function that the caller passed to score attempts."""
    CONTEXT = "context"
    """The limit on an attempt's tokens: its first prompt does not fit."""
    OPPONENT = "opponent"
    """Who plays the other seat: another model, a checkpoint or an address."""


class AttemptFailed(TurnwiseError):  # noqa: N818
    """An attempt could not be finished through no fault of the policy; it is never scored.

    `facts` holds what a program may want to know of it, such as a number that `detail` says in words.
    """

    def __init__(self, party: Party, detail: str, facts: Mapping[str, int | str] | None = None) -> None:
        super().__init__(f"{party}: {detail}")
        self.party = party
        self.detail = detail
        self.facts = dict(facts or {})
