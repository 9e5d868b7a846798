"""The shipped adapters: same seed, same data; prompts as documented; rewards that can be checked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from turnwise.errors import CodeRunnerError, ConfigError
from turnwise.single_turn import ChatAdapter, CodeAdapter, MathAdapter, RLAdapter, chat
from turnwise.single_turn.code import PROBLEMS, CodeProblem, extract_code
from turnwise.single_turn.code_runner import RunLimits, Test, run_tests
from turnwise.single_turn.math import EXAMPLES, Addition


@pytest.fixture(scope="module")
def tokenizer(tiny_dir: Path) -> Any:
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer
    return loader.from_pretrained(str(tiny_dir))


@pytest.mark.parametrize("adapter", [MathAdapter(), ChatAdapter(), CodeAdapter()])
def test_adapters_build_the_same_dataset_twice_and_prompts_of_ids(adapter: RLAdapter[Any], tokenizer: Any) -> None:
    samples = adapter.build_dataset()
    assert samples == adapter.build_dataset()
    assert len(set(samples)) == len(samples) > 1
    for sample in samples:
        prompt = adapter.make_prompt(sample, tokenizer)
        assert isinstance(prompt, list)
        assert all(isinstance(token, int) for token in prompt)


# --- math ---


def test_a_math_prompt_is_solved_examples_and_then_the_question(tokenizer: Any) -> None:
    text = tokenizer.decode(MathAdapter().make_prompt(Addition(3, 5), tokenizer))
    assert text.startswith("Q: What is 2 + 2?\nA: 4\nQ: What is 6 + 1?\nA: 7\n")
    assert text.endswith("\nQ: What is 3 + 5?\nA:")


def test_math_questions_are_all_different_and_never_among_the_examples() -> None:
    samples = MathAdapter(num_samples=1000, max_addend=9).build_dataset()
    assert len(samples) == len(set(samples)) == 100 - len(EXAMPLES)
    assert not set(samples) & set(EXAMPLES)
    assert MathAdapter(seed=1).build_dataset() != MathAdapter(seed=2).build_dataset()


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (" 8", 1.0),
        (" 8.\nQ: What is 9 + 9?", 1.0),
        ("The answer is 8", 1.0),
        (" 80", 0.0),
        (" 08", 1.0),
        (" -8", 0.0),
        (" 3 + 5 = 8", 0.0),  # the first integer counts
        ("eight", 0.0),
        ("", 0.0),
    ],
)
def test_the_first_integer_of_a_response_decides(response: str, reward: float) -> None:
    assert MathAdapter().compute_reward(response, Addition(3, 5)) == reward


def test_math_refuses_an_empty_task() -> None:
    with pytest.raises(ConfigError, match="num_samples=0"):
        MathAdapter(num_samples=0)


# --- chat ---


def test_a_chat_prompt_ends_where_the_assistant_begins(tokenizer: Any) -> None:
    text = tokenizer.decode(ChatAdapter(["Hello?"]).make_prompt("Hello?", tokenizer))
    assert text == "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("worse", "better"),
    [
        ("", "Yes."),
        ("Yes.", "Open a window and take a short walk outside."),
        ("open a window and take a short walk outside", "Open a window and take a short walk outside."),
        ("Go out. Go out. Go out. Go out. Go out.", "Go out. Drink some water. Call a friend. Read. Sleep well."),
        ("Walk every single day. " * 60, "Walk every single day, in any weather, and bring a good friend along."),
        ("Take a walk. Then have a glass of", "Take a walk. Then have a glass of water."),
    ],
)
def test_the_judge_prefers_replies_of_some_length_in_whole_sentences_without_repetition(
    worse: str, better: str
) -> None:
    assert 0 <= chat.judge(worse) < chat.judge(better) <= 1


def test_the_judges_three_scores_are_as_documented() -> None:
    assert [chat.length_score(n) for n in (4, 8, 60, 120)] == [0.5, 1, 1, 0.5]
    assert chat.completeness_score("This is one. this is not. Nor is this") == pytest.approx(1 / 3)
    assert chat.diversity_score(["a", "b", "c", "d", "d"]) == 1
    assert chat.diversity_score(["a"] * 10) == pytest.approx(0.125)
    assert chat.judge("... !!!") == 0


def test_chat_refuses_a_string_for_a_list_of_questions() -> None:
    with pytest.raises(ConfigError, match="expected a list of user messages"):
        ChatAdapter("Hello?")


# --- code ---

GOOD_ANSWERS = {
    "add": "def add(a, b):\n    return a + b",
    "is_even": "def is_even(n):\n    return n % 2 == 0",
    "largest": "def largest(numbers):\n    return max(numbers)",
    "backwards": "def backwards(text):\n    return text[::-1]",
    "count_vowels": "def count_vowels(text):\n    return sum(letter in 'aeiou' for letter in text)",
    "absolute": "def absolute(n):\n    return abs(n)",
}


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.tests[0].call.split("(")[0])
def test_every_shipped_problem_can_be_solved(problem: CodeProblem) -> None:
    answer = GOOD_ANSWERS[problem.tests[0].call.split("(")[0]]
    assert CodeAdapter().compute_reward(f"\n{answer}\n\nQ: Write another one.", problem) == 1.0


def test_code_is_rewarded_by_the_share_of_tests_it_passes() -> None:
    problem = CodeProblem("?", (Test("f(1)", 1), Test("f(2)", 4), Test("f(3)", 9), Test("f(4)", 16)))
    assert CodeAdapter().compute_reward("def f(n):\n    return n if n == 1 else 4", problem) == 0.5
    assert CodeAdapter().compute_reward("I do not know.", problem) == 0.0


def test_a_code_prompt_is_an_example_and_then_the_problem(tokenizer: Any) -> None:
    text = tokenizer.decode(CodeAdapter().make_prompt(PROBLEMS[0], tokenizer))
    assert text.startswith("Q: Write a function double(n)")
    assert text.endswith("\n\nQ: Write a function add(a, b) that returns the sum of a and b.\nA:")


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("\nx = 1\n\nQ: more?", "\nx = 1\n"),
        ("Sure!\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n", "x = 1\n"),
        ("x = 1", "x = 1"),
    ],
)
def test_code_is_found_in_fences_or_before_the_next_question(response: str, code: str) -> None:
    assert extract_code(response) == code


def test_code_that_hangs_is_wrong_but_a_runner_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = CodeAdapter(limits=RunLimits(cpu_s=1, wall_s=0.5))
    assert adapter.compute_reward("import time\ntime.sleep(60)", PROBLEMS[0]) == 0.0
    monkeypatch.setattr("turnwise.envs.sandbox.python_tests.child_source", lambda: b"raise SystemExit(3)")
    with pytest.raises(CodeRunnerError, match="ended with 3 before it was ready"):
        run_tests("x = 1", PROBLEMS[0].tests)
