from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.errors import ConfigError
from turnwise.retriever.wordnet import read_wordnet

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by  \n"
NOUNS = """\
02083346 05 n 02 canine 0 canid 0 002 @ 02075296 n 0000 ~ 02084071 n 0000 | any of various fissiped mammals  
02084071 05 n 03 dog 0 domestic_dog 0 Canis_familiaris 0 002 @ 02083346 n 0000 %p 02158846 n 0000 | a member of the \
genus Canis; "the dog barked all night"  
02158846 05 n 01 flag 7 001 #p 02084071 n 0000 | a conspicuously marked or shaped tail  
10114209 18 n 01 dog 1 000 | informal term for a man; "you lucky dog"  
"""  # noqa: W291 - as the files have it
VERBS = "02005948 38 v 02 dog 0 tail 1 000 01 + 08 00 | go after with the intent to catch  \n"
ADJECTIVES = "00001740 00 s 01 able(p) 0 001 ! 00002098 a 0101 | having the necessary means\n"


def _write(folder: Path) -> None:
    for name, text in {"noun": NOUNS, "verb": VERBS, "adj": ADJECTIVES, "adv": ""}.items():
        (folder / f"data.{name}").write_text(LICENCE + text, encoding="utf-8")


def test_each_meaning_is_a_passage_with_its_words_its_gloss_and_its_relations(tmp_path: Path) -> None:
    _write(tmp_path)
    canine, dog, flag, man, verb, able = [document.contents for document in read_wordnet(tmp_path)]
    assert canine == '"canine"\ncanine (noun), also canid: any of various fissiped mammals. Kinds of it: dog.'
    assert dog == (
        '"dog"\ndog (noun), also domestic dog, Canis familiaris: a member of the genus Canis; "the dog barked all '
        'night". It is a kind of canine. It has the part flag.'
    )
    assert flag.endswith("It is a part of dog.")
    assert man == '"dog (noun 2)"\ndog (noun): informal term for a man; "you lucky dog".'
    assert verb == '"dog (verb 3)"\ndog (verb), also tail: go after with the intent to catch.'
    assert able == '"able"\nable (adjective): having the necessary means.'


def test_a_missing_file_and_a_damaged_line_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no data\.noun in .*wordnet-base"):
        read_wordnet(tmp_path)
    _write(tmp_path)
    (tmp_path / "data.adv").write_text(LICENCE + "00001740 02 r 0x 01\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.adv, line 2: .*expected a line of a WordNet data file"):
        read_wordnet(tmp_path)
