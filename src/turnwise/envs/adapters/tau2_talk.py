"""What is said in tau2's worlds: by the scripted customer and clerk, and to a model that plays the customer.

The script is made from the task's instructions, which speak to whoever plays the customer ("You want ..."). It tells
them in the first person, one part after the other, and does on its phone what the clerk names. It does not understand
what it is told: the words it looks for are below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.envs.adapters.tau2_tools import ServiceTool, gold_actions, read_guidelines, read_tools
from turnwise.envs.tools import CALL_FORMAT, format_tool_call
from turnwise.trajectory import ToolCall

STOP, TRANSFER, OUT_OF_SCOPE = "###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"
ENDS = (STOP, TRANSFER, OUT_OF_SCOPE)
"""What a customer says to end the conversation, as in the benchmark."""
OPENING = "Begin the interaction. You are the customer, and you talk to the clerk of a company."
AGREES = "Yes, please."
ASK_MORE = "Is there anything else that I should know?"
_IDENTITY = re.compile(
    r"\b(name|e-?mail|zip|phone|number|id|identity|identify|verify|who|order|reservation|confirmation)\b", re.IGNORECASE
)
"""The words by which the script knows that it is asked who it is and what it knows."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_FIRST_PERSON = (
    (r"\byou are\b", "I am"),
    (r"\byou're\b", "I am"),
    (r"\byou were\b", "I was"),
    (r"\byou've\b", "I have"),
    (r"\byourself\b", "myself"),
    (r"\byours\b", "mine"),
    (r"\byour\b", "my"),
    (
        r"\b(to|for|with|of|from|by|at|about|give|gives|tell|tells|ask|asks|offer|offers|let|lets|help|helps) you\b",
        r"\1 me",
    ),
    (r"\byou\b", "I"),
)


def to_first_person(text: str) -> str:
    """Instructions as the customer says them: `You are Ann.` becomes `I am Ann.`"""
    for pattern, words in _FIRST_PERSON:
        text = re.sub(pattern, words, text, flags=re.IGNORECASE)
    return re.sub(r"(^|[.!?]\s+)([a-z])", lambda found: found[1] + found[2].upper(), text)


def pieces_of(case: Mapping[str, Any]) -> list[str]:
    """What the script tells, in this order: why it calls, what it knows, what it does not know, what it wants."""
    told = case["user_scenario"]["instructions"]
    texts = [told.get(name) or "" for name in ("reason_for_call", "known_info", "unknown_info", "task_instructions")]
    kept = [[part for part in _SENTENCE.split(text.strip()) if part and "tool call" not in part] for text in texts]
    return [to_first_person(" ".join(" ".join(parts).split())) for parts in kept if parts]


def next_words(said: str, pieces: Sequence[str], num_told: int) -> tuple[str, int]:
    """The script's answer to the clerk's words, and how many pieces are told then."""
    if num_told > 1 and _IDENTITY.search(said) and "?" in said:
        return pieces[1], num_told  # the second piece is what it knows; it may be told again
    if num_told < len(pieces):
        return pieces[num_told], num_told + 1
    return (AGREES, num_told) if "?" in said else (STOP, num_told)


def asked_call(said: str, tools: Mapping[str, ServiceTool]) -> ToolCall | None:
    """What the clerk asks the customer to do on the phone: the first tool that is named, with the named values.

    `Please use set_network_mode_preference with mode 4g_only.` names one; so does `set network mode preference`.
    """
    text = said.lower().replace("-", " ")
    places: list[tuple[int, ServiceTool]] = []
    for tool in tools.values():
        place = max(text.find(tool.name), text.find(tool.name.replace("_", " ")))
        if place >= 0:
            places.append((place, tool))
    if not places:
        return None
    tool = min(places, key=lambda found: (found[0], -len(found[1].name)))[1]
    values = {name: _named_value(said, name) for name in tool.parameters}
    given = {name: value for name, value in values.items() if value is not None}
    return ToolCall(name=tool.name, arguments=given) if all(name in given for name in tool.required) else None


def _named_value(said: str, name: str) -> str | None:
    pattern = rf"\b{re.escape(name).replace('_', '[_ ]')}\b\s*(?:=|:|is|to)?\s*[\"'`]?([\w.-]*\w)"
    found = re.search(pattern, said, re.IGNORECASE)
    return found[1] if found else None


def ask_for_action(action: Mapping[str, Any]) -> str:
    """How the scripted clerk asks the customer to do something on the phone."""
    values = [f"{name} {value}" for name, value in action["arguments"].items()]
    return f"Please use {action['name']}" + (f" with {' and '.join(values)}." if values else ".")


def expert_replies(case: Mapping[str, Any]) -> list[str]:
    """A clerk who hears the customer out, makes the calls of the answer, and tells what has to be told."""
    replies = [ASK_MORE] * (len(pieces_of(case)) - 1)
    for action in gold_actions(case):
        is_own = action.get("requestor", "assistant") == "assistant"
        replies.append(format_tool_call(action["name"], **action["arguments"]) if is_own else ask_for_action(action))
    facts = [str(fact) for fact in case["evaluation_criteria"].get("communicate_info") or ()]
    return [*replies, f"It is done: {'; '.join(facts)}." if facts else "It is done."]


def brief_customer(domain: str, case: Mapping[str, Any]) -> str:
    """What a model is told that plays the customer: the package's guidelines, the scenario, and its tools."""
    told, persona = case["user_scenario"]["instructions"], case["user_scenario"].get("persona")
    lines = [f"{name.replace('_', ' ').capitalize()}: {value}" for name, value in told.items() if value]
    scenario = "\n".join([f"Persona: {persona}"] * bool(persona) + lines)
    parts = [read_guidelines(domain), f"<scenario>\n{scenario}\n</scenario>"]
    if tools := read_tools(domain, "user"):
        listed = "\n".join(tool.to_text() for tool in tools.values())
        parts.append(f"Tools on your phone:\n{listed}\nCall a tool like this:\n{CALL_FORMAT}")
    return "\n".join(parts)


def is_told(fact: str, said: Sequence[str]) -> bool:
    """Whether the clerk told a fact, by the package's rule: the text is in its words, commas aside."""
    return fact.lower() in "\n".join(said).lower().replace(",", "")
