"""The protocol of the world `negotiate` inside free text: offers and acceptance, each on a line of its own.

    The flat is worth more than that.
    Offer: rent=1,100; deposit=2 months

    Accept

Whatever stands on other lines is talk, and so is a line that says more than that it accepts: "Accept? Never.", "Agreed,
except pets". A line that begins with > or a quotation mark repeats what somebody said, and is talk, too. Numbers may be
written as 1100, 1,100, 1 100, 1'100, 1.100 or $1,100.00; units, percent signs and case do not matter. A reading that
fits two options, or none, makes the whole offer unreadable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from turnwise.envs.library.negotiate_games import Issue

# Marks such as **, - and ` may stand before the word, but no mark of quotation: who quotes an offer does not make it.
_LEAD = r"[^\w>\"'“”„«»‘’]*(?:i\s+)?"
_OFFER = re.compile(rf"^{_LEAD}(?:offer|propose|proposal)\b\s*[:\-]?\s*(?P<terms>.*)$", re.IGNORECASE)
_ACCEPT = re.compile(rf"^{_LEAD}(?:accept(?:ed)?|agreed)\b(?P<rest>.*)$", re.IGNORECASE)
# All that may stand after the word. A question mark is no end: "Accept?" asks.
_WHAT = r"(?:(?:to|on)\s+)?(?:it|that|this|(?:(?:your|the|this|that)\s+)?(?:last\s+)?(?:offer|deal|proposal|terms))"
_THANKS = r"thanks|thank\s+you(?:\s+very\s+much)?|gladly|happily|with\s+pleasure|then|now|please|done|deal"
_PLAIN_END = re.compile(rf"(?:[^\w?]+{_WHAT}\b)?(?:[^\w?]+(?:{_THANKS})\b)*[^\w?]*", re.IGNORECASE)
MAX_HEARD = 400
"""Characters of a reply that the other side hears; more would fill its context."""
_NUMBER = re.compile(r"\d+(?:[.,'’ \u00a0\u202f]\d+)*")
_SCALES = {"k": 1000, "thousand": 1000, "m": 1_000_000, "million": 1_000_000}
_POINTS = re.compile(r"(?<=[\w%])\s*\(\d+\)")
"""Points behind an option, as the rules list them: `8,000 (2)`."""
_GROUPED = re.compile(r"\d{1,3}(?:[.,'’ \u00a0\u202f]\d{3})+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a reply says in the terms of the protocol. A reply that says neither is talk."""

    offer: Mapping[str, int] | None = None
    """Issue to option. None if there is no offer."""
    is_acceptance: bool = False
    is_malformed: bool = False
    """There is a line that begins like an offer, and it cannot be read."""


def read_reply(text: str, issues: Sequence[Issue]) -> Reading:
    """Read the last offer of a reply, and whether it accepts. "Accept" with other words than that it does ("accept if
    ...", "accept no less than 900") is talk."""
    offers: list[Mapping[str, int] | None] = []
    is_acceptance = False
    for line in text.splitlines():
        if found := _OFFER.match(line):
            offers.append(_read_terms(found["terms"], issues))
        elif found := _ACCEPT.match(line):
            is_acceptance = _PLAIN_END.fullmatch(found["rest"]) is not None
    if not offers:
        return Reading(is_acceptance=is_acceptance)
    return Reading(offer=offers[-1], is_acceptance=is_acceptance, is_malformed=offers[-1] is None)


def heard_part(text: str, issues: Sequence[Issue]) -> str:
    """What the other side hears of a reply: its beginning, and the last offer, which counts wherever it stands."""
    begin = text[:MAX_HEARD].strip()
    if len(text) <= MAX_HEARD:
        return begin
    whole, part = read_reply(text, issues), read_reply(begin, issues)
    if whole.offer is not None and whole.offer != part.offer:
        return f"{begin}\n{write_offer(whole.offer, issues)}"
    return f"{begin}\nOffer: (unreadable)" if whole.is_malformed and not part.is_malformed else begin


def write_offer(offer: Mapping[str, int], issues: Sequence[Issue]) -> str:
    """The line of an offer, as the protocol has it."""
    terms = [f"{issue.name}={issue.options[offer[issue.name]]}" for issue in issues if issue.name in offer]
    return f"Offer: {'; '.join(terms)}"


def _read_terms(text: str, issues: Sequence[Issue]) -> dict[str, int] | None:
    """Issue to option, for every issue that is named. None if nothing is, or if one cannot be read."""
    names = "|".join(re.escape(issue.name) for issue in issues)
    marks = list(re.finditer(rf"\b({names})\b\s*[:=]?\s*", text, re.IGNORECASE))
    by_name = {issue.name.lower(): issue for issue in issues}
    if not marks and len(issues) == 1:
        chosen = find_option(text, issues[0].options)
        return None if chosen is None else {issues[0].name: chosen}
    found: dict[str, int] = {}
    for index, mark in enumerate(marks):
        end = marks[index + 1].start() if index + 1 < len(marks) else len(text)
        issue = by_name[mark[1].lower()]
        chosen = find_option(text[mark.end() : end].partition(";")[0], issue.options)
        if chosen is None or found.get(issue.name, chosen) != chosen:
            return None
        found[issue.name] = chosen
    return found or None


def find_option(text: str, options: Sequence[str]) -> int | None:
    """The one option that a text names: by its words, or by its number. None if it is not exactly one."""
    said = _plain(text)
    exact = [index for index, option in enumerate(options) if _plain(option) == said]
    if len(exact) == 1:
        return exact[0]
    worths = [_values(option) for option in options]
    said_values = list(_all_values(_POINTS.sub("", text))) if any(worths) else []
    if said_values and all(said_values):
        counted = [[index for index, worth in enumerate(worths) if worth & values] for values in said_values]
        chosen = counted[0][0] if len(counted[0]) == 1 else None
        named = {index for same in counted for index in same}
        named |= _spoken(said, {index: option for index, option in enumerate(options) if not worths[index]})
    else:
        begun = [index for index, option in enumerate(options) if f"{said} ".startswith(f"{_plain(option)} ")]
        chosen = max(begun, key=lambda index: len(options[index])) if begun else None
        named = _spoken(said, dict(enumerate(options)))
    return chosen if named == {chosen} else None


def _spoken(said: str, options: Mapping[int, str]) -> set[int]:
    """The options whose words stand somewhere in a plain text; "kept" does not stand in "kept a year"."""
    left, found = f" {said} ", set[int]()
    for index, option in sorted(options.items(), key=lambda item: -len(item[1])):
        words = f" {_plain(option)} "
        if words in left:
            found.add(index)
            left = left.replace(words, " | ")
    return found


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[^\w%']+", " ", text.lower()).split())


def _values(text: str) -> set[Decimal]:
    """Every value that the first number of a text may have: 1.200 is 1.2 or 1200."""
    return next(_all_values(text), set[Decimal]())


def _all_values(text: str) -> Iterator[set[Decimal]]:
    """The same for each number of a text; an empty set for one that cannot be read."""
    for found in _NUMBER.finditer(text):
        values = _readings(found[0])
        unit = re.match(r"\s*([a-zA-Z]+)", text[found.end() :])
        scale = _SCALES.get(unit[1].lower()) if unit else None
        yield values | {(value * scale).normalize() for value in values} if scale else values


def _readings(digits: str) -> set[Decimal]:
    readings = {_as_decimal(digits)} if not _GROUPED.fullmatch(digits) else set[Decimal | None]()
    whole, separator, rest = _split_cents(digits)
    if _GROUPED.fullmatch(whole) or whole.isdigit():
        joined = re.sub(r"\D", "", whole)
        readings.add(_as_decimal(f"{joined}.{rest}" if separator else joined))
    if _GROUPED.fullmatch(digits):
        readings.add(Decimal(re.sub(r"\D", "", digits)))
        if digits.count(".") == 1 and not re.search(r"[,'’ ]", digits):
            readings.add(Decimal(digits))
    return {value.normalize() for value in readings if value is not None}


def _split_cents(digits: str) -> tuple[str, str, str]:
    """The whole part, the separator and the cents of 1,200.50 or 1.200,50; no separator if there are no cents."""
    cents = re.fullmatch(r"(.+)([.,])(\d{1,2})", digits)
    return (cents[1], cents[2], cents[3]) if cents else (digits, "", "")


def _as_decimal(digits: str) -> Decimal | None:
    return Decimal(digits) if re.fullmatch(r"\d+(?:\.\d+)?", digits) else None
