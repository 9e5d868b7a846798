"""The tools and the data of tau2-bench, as the package `inspect-evals` has them, with a state for every attempt.

The package keeps the state in a store of the running context. Here each attempt has a store of its own, and a call runs
in a context that holds it, so attempts share nothing. Calls are names and JSON arguments; no text is evaluated.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import gzip
import hashlib
import importlib
import importlib.resources
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from turnwise.envs.adapters.peers import import_peer
from turnwise.errors import ConfigError
from turnwise.runtime.suggest import did_you_mean
from turnwise.trajectory import ToolCall

PACKAGE = "inspect_evals"
DOMAINS = ("retail", "airline", "telecom")
Caller = Literal["assistant", "user"]
_NO_STATE = ("calculate", "transfer_to_human_agents")
"""Calls of an answer that change nothing; the package does not replay them."""
_READS = ("get_", "find_", "list_", "search_", "check_", "can_", "run_", "calculate")
_SHOWN_ERROR = 300

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTool:
    """One tool of the clerk, or of the telecom customer's phone."""

    name: str
    description: str
    parameters: Mapping[str, str]
    """The type of each argument."""
    required: tuple[str, ...]
    execute: Callable[..., Coroutine[Any, Any, Any]]

    def to_text(self) -> str:
        arguments = [
            f"{name}: {kind}" + ("" if name in self.required else " (optional)")
            for name, kind in self.parameters.items()
        ]
        return f"- {self.name}({', '.join(arguments)}): {self.description}"


def check_package() -> None:
    """Refuse to go on without the package, and say how to install it."""
    import_peer("inspect_ai", extra="tau2", then="pip install --no-deps inspect-evals")
    import_peer(PACKAGE, extra="tau2", then="pip install --no-deps inspect-evals")


@functools.cache
def read_tools(domain: str, who: Caller) -> Mapping[str, ServiceTool]:
    """The tools of a side, by name. Only a telecom customer has any."""
    if who == "user" and domain != "telecom":
        return {}
    module = importlib.import_module(f"{PACKAGE}.tau2.{domain}.{'user_tools' if who == 'user' else 'tools'}")
    (listed,) = (value for name, value in vars(module).items() if name.startswith("all_") and name.endswith("_tools"))
    define = importlib.import_module("inspect_ai.tool").ToolDef
    found = [_read_tool(define(make())) for make in listed]
    return {tool.name: tool for tool in found}


def _read_tool(definition: Any) -> ServiceTool:
    parameters = definition.parameters
    return ServiceTool(
        name=definition.name,
        description=" ".join(str(definition.description).split()),
        parameters={name: _type_name(about) for name, about in parameters.properties.items()},
        required=tuple(parameters.required),
        execute=definition.tool,
    )


def _type_name(about: Any) -> str:
    options = getattr(about, "anyOf", None)
    return "|".join(_type_name(one) for one in options) if options else str(about.type or "any")


def data_folder(domain: str) -> Any:
    return importlib.resources.files(PACKAGE) / "tau2" / "data" / "domains" / domain


@functools.cache
def read_cases(domain: str) -> Mapping[str, Mapping[str, Any]]:
    """The tasks of a domain by id, as the package has them."""
    folder = data_folder(domain)
    if (folder / "tasks.json").is_file():
        rows = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    else:
        rows = json.loads(gzip.decompress((folder / "tasks.json.gz").read_bytes()))
    return {row["id"]: row for row in rows}


@functools.cache
def read_splits(domain: str) -> Mapping[str, frozenset[str]]:
    """The benchmark's own lists of tasks: train, test, base, and for telecom full and small."""
    found = json.loads((data_folder(domain) / "split_tasks.json").read_text(encoding="utf-8"))
    return {name: frozenset(ids) for name, ids in found.items()}


@functools.cache
def read_policy(domain: str) -> str:
    """What the clerk has to keep to."""
    agents = importlib.import_module(f"{PACKAGE}.tau2.{domain}.agents")
    return agents.get_domain_policy(workflow=False) if domain == "telecom" else agents.get_domain_policy()


@functools.cache
def read_guidelines(domain: str) -> str:
    """What the package tells a model that plays the customer."""
    texts = importlib.import_module(f"{PACKAGE}.tau2.utils")
    return texts.USER_SIMULATOR_GUIDELINES_WITH_TOOLS if domain == "telecom" else texts.USER_SIMULATOR_GUIDELINES


def gold_actions(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The calls of a task's answer, in order."""
    return list(case["evaluation_criteria"].get("actions") or ())


def is_read_only(name: str) -> bool:
    """Whether a tool only looks something up."""
    return name.startswith(_READS)


class SharedTable(dict[str, Any]):
    """The rows of a table, by key. A row is copied when somebody takes it, so the rows of the base never change."""

    def __init__(self, base: Mapping[str, Any]) -> None:
        super().__init__(base)
        self._base = base
        self._owned: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._own(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is how get works

    def values(self) -> Any:
        self._own(*self)
        return super().values()

    def items(self) -> Any:
        self._own(*self)
        return super().items()

    def changes(self) -> dict[str, Any]:
        """The rows that are not as in the base; None for one that is gone."""
        taken = {key for key in self if key in self._owned or key not in self._base}
        changed = {key: super(SharedTable, self).__getitem__(key) for key in taken}
        gone = {key: None for key in self._base if key not in self}
        return gone | {key: row.model_dump() for key, row in changed.items() if row != self._base.get(key)}

    def copy(self) -> SharedTable:
        twin = SharedTable(self._base)
        twin._owned = set(self._owned)
        for key in self._base.keys() - self.keys():
            del twin[key]
        for key in self:
            if key in self._owned or key not in self._base:
                twin[key] = super().__getitem__(key).model_copy(deep=True)
        return twin

    def _own(self, *keys: str) -> None:
        for key in keys:
            if key in self._base and key in self and key not in self._owned:
                self._owned.add(key)
                super().__setitem__(key, super().__getitem__(key).model_copy(deep=True))


class ServiceState:
    """The database of one attempt, and for telecom the customer's phone."""

    def __init__(self, domain: str, data: Mapping[str, Any]) -> None:
        self.domain = domain
        self._store = importlib.import_module("inspect_ai.util").Store()
        for name, value in data.items():  # its constructor would copy everything
            self._store.set(name, value)

    @classmethod
    def of(cls, domain: str, case: Mapping[str, Any]) -> ServiceState:
        """The state at the start of a task."""
        state = cls(domain, {name: _start_from(value) for name, value in _fresh_data(domain).items()})
        first: Mapping[str, Any] = case.get("initial_state") or {}
        for action in first.get("initialization_actions") or ():
            state._inside(functools.partial(state._set_up, action))
        return state

    def call(self, call: ToolCall, who: Caller = "assistant") -> str:
        """Make a call. A failed call is an answer that begins with `Error`."""
        tools = read_tools(self.domain, who)
        if call.name not in tools:
            return f"Error: no tool {call.name[:40]!r}{did_you_mean(call.name, tools)}"
        tool = tools[call.name]
        unknown = [name for name in call.arguments if name not in tool.parameters]
        missing = [name for name in tool.required if name not in call.arguments]
        if unknown or missing:
            takes = ", ".join(tool.parameters) or "no arguments"
            return f"Error: {tool.name} takes {takes}; check {(unknown + missing)[0]!r}"
        try:
            return self._inside(lambda: str(_run_at_once(tool.execute(**json.loads(json.dumps(call.arguments))))))
        except ConfigError:
            raise  # the package is another one than we know
        except Exception as error:  # noqa: BLE001 - the tools check little, so most of these are the policy's arguments
            name = "" if type(error).__name__ == "ToolError" else f"{type(error).__name__}: "
            return f"Error: {name}{str(error)[:_SHOWN_ERROR]}"

    def follow(self, actions: Sequence[Mapping[str, Any]]) -> None:
        """Make the calls of an answer, as the package's check does: a call that fails changes nothing."""
        tool_error = importlib.import_module("inspect_ai.tool").ToolError
        tools = self._inside(self._tools)
        for action in actions:
            if action["name"] not in _NO_STATE:
                with contextlib.suppress(tool_error):
                    self._inside(functools.partial(getattr(tools, action["name"]), **action["arguments"]))

    def holds(self, assertion: Mapping[str, Any]) -> bool:
        """Whether one of the package's assertions about the phone or the customer's data is true."""
        return self._inside(lambda: self._holds(assertion))

    def changes(self) -> dict[str, Any]:
        """The rows of the database that are not as at the start, by table."""
        tables: dict[str, SharedTable] = _tables_of(self._inside(self._tools).db)
        return {name: rows for name, table in tables.items() if (rows := table.changes())}

    def read_all(self) -> dict[str, Any]:
        """Read the package's data into an empty state, and return them."""
        telecom = f"{PACKAGE}.tau2.telecom.environment"
        self._inside(importlib.import_module(telecom).get_environment if self.domain == "telecom" else self._tools)
        return dict(self._store.items())

    def copy(self) -> ServiceState:
        return ServiceState(self.domain, {name: _twin(value) for name, value in self._store.items()})

    def _inside(self, work: Callable[[], T]) -> T:
        """Do something in a context whose store is this state's."""

        def do() -> T:
            importlib.import_module("inspect_ai.util._store").init_subtask_store(self._store)
            return work()

        return contextvars.copy_context().run(do)

    def _tools(self) -> Any:
        """The package's object that holds the database. For retail and airline only."""
        module = importlib.import_module(f"{PACKAGE}.tau2.{self.domain}.tools")
        return getattr(module, f"get_{self.domain}_tools")()

    def _set_up(self, action: Mapping[str, Any]) -> None:
        environment, side = self._side(action)
        getattr(side, action["func_name"])(**action["arguments"])
        environment.sync_tools()

    def _holds(self, assertion: Mapping[str, Any]) -> bool:
        _, side = self._side(assertion)
        found = getattr(side, assertion["func_name"])(**assertion["arguments"])
        return found == assertion.get("assert_value", True)

    def _side(self, action: Mapping[str, Any]) -> tuple[Any, Any]:
        environment = importlib.import_module(f"{PACKAGE}.tau2.telecom.environment").get_environment()
        return environment, environment.user_tools if action["env_type"] == "user" else environment.tools


def _fields_of(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], getattr(value, "__dict__", {}))


def _tables_of(database: object) -> dict[str, SharedTable]:
    return {name: value for name, value in _fields_of(database).items() if isinstance(value, SharedTable)}


def _start_from(value: Any) -> Any:
    """What an attempt starts with in place of a value of the fresh store: tables share their rows with it."""
    tables = {name: rows for name, rows in _fields_of(value).items() if _is_table(rows)}
    if not tables:
        return copy.deepcopy(value)
    return value.model_copy(update={name: SharedTable(rows) for name, rows in tables.items()})


def _is_table(rows: object) -> bool:
    if not isinstance(rows, dict) or not rows:
        return False
    return all(hasattr(row, "model_copy") for row in cast(dict[str, object], rows).values())


def _twin(value: Any) -> Any:
    tables = _tables_of(value)
    if not tables:
        return copy.deepcopy(value)
    return value.model_copy(update={name: table.copy() for name, table in tables.items()})


@functools.cache
def _fresh_data(domain: str) -> Mapping[str, Any]:
    """The data of a domain before any task; read once, because the files take a second. Nobody changes it."""
    return ServiceState(domain, {}).read_all()


def _run_at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as those of the package's tools."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast(T, end.value)
    work.close()
    raise ConfigError("a tool of tau2 waits for something; this version of inspect-evals is not supported")


def is_same_call(call: ToolCall, action: Mapping[str, Any]) -> bool:
    """Whether a call is one of the answer's. Which words a transfer is made with does not matter."""
    if call.name != action["name"]:
        return False
    compared = action.get("compare_args")
    if call.name == "transfer_to_human_agents" or compared == []:
        return True
    equal = importlib.import_module(f"{PACKAGE}.tau2.utils").deep_equal_unordered
    names = compared if compared is not None else [*call.arguments, *action["arguments"]]
    return all(equal(call.arguments.get(name), action["arguments"].get(name)) for name in names)


@functools.lru_cache(maxsize=4096)
def gold_changes(domain: str, case_id: str) -> Mapping[str, Any]:
    """What a task's answer changes in the database."""
    case = read_cases(domain)[case_id]
    state = ServiceState.of(domain, case)
    state.follow(gold_actions(case))
    return state.changes()


def digest_of(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
