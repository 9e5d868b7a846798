"""Where the last tokens of a sequence stood before."""

from __future__ import annotations

from array import array

import numpy as np

from turnwise.engine.sampling.drafts import MOST_TOKENS, SuffixIndex, Text
from turnwise.engine.sampling.speculation import continuation


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


def random_ids(count: int, seed: int) -> array[int]:
    return ids(*np.random.default_rng(seed).integers(0, 50_000, count).tolist())


def found_after(index: SuffixIndex, tokens: array[int], count: int = 3) -> list[int]:
    match = index.find(tokens)
    return [] if match is None else continuation(match, tokens, count)


def test_what_followed_in_a_prompt_is_found_by_two_tokens_or_more() -> None:
    index = SuffixIndex()
    index.add_prompt(ids(1, 2, 3, 4, 5, 6))
    assert found_after(index, ids(9, 2, 3)) == [4, 5, 6]
    assert found_after(index, ids(3, 9)) == []
    assert found_after(index, ids(7, 5, 6)) == [], "nothing follows the end"


def test_more_tokens_that_agree_go_before_a_newer_place() -> None:
    index = SuffixIndex()
    start = random_ids(20, 1)
    index.add_prompt(start + ids(70))
    index.add_prompt(random_ids(9, 2) + start[-2:] + ids(71))
    assert found_after(index, start, 1) == [70], "eight tokens agree"
    assert found_after(index, random_ids(5, 3) + start[-2:], 1) == [71], "two agree, and this place is newer"


def test_a_running_reply_is_found_by_its_siblings_as_it_grows() -> None:
    index = SuffixIndex()
    prompt, reply = random_ids(12, 1), random_ids(40, 2)
    tokens = prompt[:]
    text = index.begin(tokens, len(prompt))
    for token in reply:
        tokens.append(token)
        index.grow(text)
    assert found_after(index, prompt, 4) == reply[:4].tolist()
    assert found_after(index, random_ids(3, 3) + reply[5:13], 4) == reply[13:17].tolist()


def test_a_finished_reply_stays_without_its_prompt() -> None:
    index = SuffixIndex()
    prompt, reply = random_ids(100, 1), random_ids(40, 2)
    index.finish(index.begin(prompt + reply, len(prompt)))
    assert index.num_tokens == len(reply) + 8
    assert found_after(index, prompt, 4) == reply[:4].tolist()
    assert found_after(index, reply[:20], 4) == reply[20:24].tolist()
    assert found_after(index, prompt[:50]) == []


def test_a_reply_that_was_given_up_is_not_found() -> None:
    index = SuffixIndex()
    tokens = random_ids(40, 1)
    text = index.begin(tokens, 4)
    index.grow(text, is_due=True)
    assert found_after(index, tokens[:20]) != []
    index.drop(text)
    assert found_after(index, tokens[:20]) == []


def test_a_sequence_that_repeats_itself_is_guessed_to_go_on() -> None:
    index = SuffixIndex()
    tokens = ids(1, 2, 3, 7, 8, 9, 7, 8)
    text: Text = index.begin(tokens, 2)
    index.grow(text, is_due=True)
    assert found_after(index, tokens, 7) == [9, 7, 8, 9, 7, 8, 9]


def test_the_oldest_replies_and_prompts_go_when_there_are_too_many() -> None:
    index = SuffixIndex()
    count = MOST_TOKENS // 4
    texts = [random_ids(count, seed) for seed in range(12)]
    for tokens in texts[:6]:
        index.finish(index.begin(tokens, 0))
    for tokens in texts[6:]:
        index.add_prompt(tokens)
    assert index.num_tokens <= 2 * MOST_TOKENS

    def num_found(tokens: array[int]) -> int:
        """Of 20 places; an entry of the table may be overwritten."""
        return sum(bool(found_after(index, tokens[:stop])) for stop in range(1000, 1020))

    assert [num_found(texts[old]) for old in (0, 6)] == [0, 0]
    assert all(num_found(texts[new]) > 10 for new in (5, 11))


def test_the_same_prompt_is_kept_once() -> None:
    index = SuffixIndex()
    for _ in range(5):
        index.add_prompt(ids(1, 2, 3, 4))
    assert index.num_tokens == 4
