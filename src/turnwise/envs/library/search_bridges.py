"""Makes questions over any corpus: a blank to fill in one passage, or one that can only be found by way of another.

    one_hop   Fill the blank: "Bern is a city in ____."
    two_hop   In "Bern is a city in [1]." a name is hidden behind [1]. Fill the blank in this sentence about [1]:
              "Its capital is ____."

A passage has a title: its first line, or the name that it begins with. A bridge is a sentence that names the title of
another passage. Whoever answers a question of two hops searches for the first sentence, finds the hidden name, and
searches for that. The answer and the hidden name are never in the question. Both passages belong to the same split.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnwise.envs.library.search_answers import normalise
from turnwise.envs.library.search_questions import QuestionKind, SearchQuestion
from turnwise.envs.splits import random_for, split_of
from turnwise.errors import ConfigError
from turnwise.retriever.corpus import Document

MAX_QUESTIONS = 20_000
"""Most questions of one kind. In a larger corpus, questions are about a random part, which is the same in every run."""
PER_PASSAGE = 2
MAX_SENTENCE_CHARS = 300
MAX_TITLE_WORDS = 6
BLANK, HIDDEN = "____", "[1]"

_NAME = re.compile(r"^(?:The |A |An )?((?:[A-Z][\w'’-]*)(?: (?:of |the |de |[A-Z])[\w'’-]*)*)")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")
_FACT = re.compile(r"(?<![\w,.])\d[\d,]*(?:\.\d+)?(?![\w])|(?<=[\w,;:] )[A-Z][\w'’-]*(?: [A-Z][\w'’-]*)*")
_WORD = re.compile(r"[\w'’-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Passage:
    title: str
    sentences: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    """Sentences, each with a number or a name in it that can be left blank."""


def make_corpus_questions(documents: Sequence[Document], kind: QuestionKind) -> list[SearchQuestion]:
    """All questions of a kind about a corpus, in a fixed order."""
    if kind == "comparison":
        raise ConfigError(
            "kind=comparison needs the invented corpus; with a corpus of yours use one_hop, two_hop or mixed"
        )
    passages = _titled(documents)
    questions: list[SearchQuestion] = []
    if kind in ("one_hop", "mixed"):
        questions += _limited([one for passage in passages.values() for one in _ask_blank(passage)])
    if kind in ("two_hop", "mixed"):
        questions += _limited([one for passage in passages.values() for one in _ask_bridge(passage, passages)])
    if not {question.split for question in questions} == {"train", "test"}:
        raise ConfigError(
            f"{len(questions)} questions of kind={kind} could be made from {len(documents)} passages, not enough for "
            "both splits; passages need titles (a first line, or a name at the beginning), and two_hop needs passages "
            "that name the titles of others"
        )
    return questions


def _titled(documents: Sequence[Document]) -> dict[str, _Passage]:
    """The passages by title. A title of several passages is left out, because it names none of them."""
    read = [passage for document in documents if (passage := _read(document.contents)) is not None]
    counts = Counter(passage.title for passage in read)
    return {passage.title: passage for passage in read if counts[passage.title] == 1}


def _read(contents: str) -> _Passage | None:
    first, line_break, rest = contents.partition("\n")
    if line_break:
        title, body = first.strip().strip('"').strip(), rest
    else:
        name = _NAME.match(contents)
        title, body = name[1] if name else "", contents
    if not title or len(title.split()) > MAX_TITLE_WORDS:
        return None
    sentences = tuple(one for one in _SENTENCE_END.split(" ".join(body.split())) if len(one) <= MAX_SENTENCE_CHARS)
    return _Passage(title=title, sentences=sentences, facts=tuple(_find_facts(sentences, title)))


def _find_facts(sentences: Sequence[str], title: str) -> Iterator[tuple[str, str]]:
    """Sentences with a number or a name in them that is no part of the title and occurs once."""
    known = set(normalise(title).split())
    for sentence in sentences:
        for found in _FACT.finditer(sentence):
            text = found[0].rstrip(",")
            parts = normalise(text).split()
            if parts and sentence.count(text) == 1 and not known & set(parts):
                yield sentence, text


def _ask_blank(passage: _Passage) -> list[SearchQuestion]:
    asked = [
        SearchQuestion(
            text=f'Fill the blank: "{sentence.replace(fact, BLANK)}"',
            answer=fact,
            searches=(passage.title,),
            kind="one_hop",
            split=split_of(passage.title),
        )
        for sentence, fact in passage.facts
        if passage.title in sentence
    ]
    return random_for("passage", passage.title).sample(asked, min(PER_PASSAGE, len(asked)))


def _ask_bridge(passage: _Passage, passages: dict[str, _Passage]) -> list[SearchQuestion]:
    split = split_of(passage.title)
    ways = [
        (sentence, name, place)
        for sentence in passage.sentences
        if passage.title in sentence
        for name in _mentions(sentence, passages)
        if name not in passage.title and passage.title not in name and split_of(name) == split
        for place in range(len(passages[name].facts))
    ]
    asked: list[SearchQuestion] = []
    for sentence, name, place in random_for("bridge", passage.title).sample(ways, len(ways)):
        question = _ask_over(passage.title, sentence.replace(name, HIDDEN), passages[name], place)
        if question is not None:
            asked.append(question)
        if len(asked) == PER_PASSAGE:
            break
    return asked


def _ask_over(title: str, bridge: str, other: _Passage, place: int) -> SearchQuestion | None:
    """A question about fact `place` of another passage. None if it would tell the answer or the hidden name."""
    sentence, fact = other.facts[place]
    blank = sentence.replace(fact, BLANK).replace(other.title, HIDDEN)
    text = f'In "{bridge}" a name is hidden behind {HIDDEN}. Fill the blank in this sentence about {HIDDEN}: "{blank}"'
    if fact in text or other.title in text:
        return None
    searches = (title, other.title)
    return SearchQuestion(text=text, answer=fact, searches=searches, kind="two_hop", split=split_of(title))


def _mentions(sentence: str, passages: dict[str, _Passage]) -> list[str]:
    """The titles in a sentence, the longest at each place."""
    words = list(_WORD.finditer(sentence))
    found: list[str] = []
    place = 0
    while place < len(words):
        for length in range(min(MAX_TITLE_WORDS, len(words) - place), 0, -1):
            text = sentence[words[place].start() : words[place + length - 1].end()]
            if text in passages:
                found.append(text)
                place += length - 1
                break
        place += 1
    return list(dict.fromkeys(found))


def _limited(questions: list[SearchQuestion]) -> list[SearchQuestion]:
    unique = list({question.text: question for question in questions}.values())
    return unique if len(unique) <= MAX_QUESTIONS else random_for("corpus").sample(unique, MAX_QUESTIONS)
