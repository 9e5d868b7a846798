"""ChatML: the template's own ids, sampled ids kept as they are, and no text that becomes a control token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from turnwise.errors import ConfigError, DataError
from turnwise.renderers import get_renderer
from turnwise.renderers.base import Renderer
from turnwise.renderers.chatml import ChatML
from turnwise.renderers.dialogue import dialogue_to_turns
from turnwise.trajectory import Message

START, END = 1, 2
SMOLLM2 = Path.home() / ".cache" / "turnwise" / "models" / "smollm2"
MODELS = ["tiny", "smollm2_template", *(["smollm2"] if (SMOLLM2 / "tokenizer.json").is_file() else [])]

SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LOOK_ALIKES = [
    "<|im_end|>",
    "<|im_start|>",
    "<|im_start|>assistant\n",
    "<|endoftext|>",
    "<|im_",
    "<think>",
    "\n\n",
    "  ",
]
texts = st.lists(st.one_of(st.text(max_size=12), st.sampled_from(LOOK_ALIKES)), max_size=6).map("".join)
tame_texts = texts.filter(lambda text: "<|" not in text)
roles = st.sampled_from(["user", "tool"])


def message(role: Any, content: str) -> Message:
    return Message(role=role, content=content)


@pytest.fixture(scope="session", params=MODELS)
def tokenizer(request: pytest.FixtureRequest, tiny_tokenizer: Any, make_tokenizer: Any) -> Any:
    if request.param == "tiny":
        return tiny_tokenizer
    if request.param == "smollm2_template":
        return make_tokenizer(SMOLLM2_TEMPLATE)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(SMOLLM2)


@pytest.fixture(scope="session")
def renderer(tokenizer: Any) -> Renderer:
    chosen = get_renderer(tokenizer)
    assert isinstance(chosen, ChatML)
    return chosen


def template_ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    plain = [{"role": m.role, "content": m.content} for m in messages]
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def count(ids: list[int], token: int) -> int:
    return sum(id_ == token for id_ in ids)


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(
        st.tuples(st.sampled_from(["user", "assistant", "tool", "system"]), tame_texts), min_size=1, max_size=5
    )
)
def test_the_first_prompt_is_what_the_tokenizers_template_says(
    tokenizer: Any, renderer: Renderer, contents: list[tuple[str, str]]
) -> None:
    messages = [message(role, content) for role, content in contents]
    assert renderer.start(messages) == template_ids(tokenizer, messages)


@settings(max_examples=60, deadline=None)
@given(content=texts)
def test_what_somebody_writes_never_becomes_a_control_token(renderer: Renderer, content: str) -> None:
    plain, odd = renderer.start([message("user", "x")]), renderer.start([message("user", content)])
    for control in (0, START, END):
        assert count(odd, control) == count(plain, control)


@settings(max_examples=60, deadline=None)
@given(content=texts)
def test_a_reply_comes_back_as_it_was_written(tokenizer: Any, renderer: Renderer, content: str) -> None:
    own_ids = tokenizer(content, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assume(tokenizer.vocab_size == 448 or tokenizer.decode(own_ids) == content)  # SmolLM2 has no token for some bytes
    ids = renderer.encode_reply(message("assistant", content))
    assert ids[-1] == END
    assert renderer.parse(ids).content == content
    assert renderer.parse(ids[:-1]).content == content


@settings(max_examples=60, deadline=None)
@given(
    sampled=st.lists(st.integers(0, 447), min_size=1, max_size=12),
    observation=st.lists(st.tuples(roles, texts), min_size=1, max_size=3),
)
def test_the_next_prompt_starts_with_the_last_one_and_the_sampled_ids(
    renderer: Renderer, sampled: list[int], observation: list[tuple[str, str]]
) -> None:
    """Whatever was sampled, canonical or not, and whatever the env says next."""
    prompt = renderer.start([message("user", "Guess.")])
    extension = renderer.extend(prompt, sampled, [message(role, content) for role, content in observation])
    assert extension.is_append_only
    assert extension.ids[: len(prompt) + len(sampled)] == prompt + sampled
    added = extension.ids[len(prompt) + len(sampled) :]
    is_ended = sampled[-1] == END
    assert count(added, END) == len(observation) + (not is_ended)
    assert count(added, START) == len(observation) + 1


@settings(max_examples=40, deadline=None)
@given(replies=st.lists(st.tuples(tame_texts.filter(bool), tame_texts), min_size=1, max_size=4))
def test_turn_by_turn_and_all_at_once_agree_where_replies_are_encoded_alike(
    tokenizer: Any, renderer: Renderer, replies: list[tuple[str, str]]
) -> None:
    """A reply that starts with a line break may be joined with the one before it; all others come out the same."""
    messages = [message("user", "Guess.")]
    prompt = renderer.start(messages)
    for reply, answer in replies:
        reply = "a" + reply
        sampled = renderer.encode_reply(message("assistant", reply))
        prompt = renderer.extend(prompt, sampled, [message("user", answer)]).ids
        messages += [message("assistant", reply), message("user", answer)]
    assert prompt == template_ids(tokenizer, messages)


def test_a_reply_that_was_cut_gets_its_end_of_turn_as_observation(renderer: Renderer) -> None:
    prompt = renderer.start([message("user", "Guess.")])
    whole = renderer.encode_reply(message("assistant", "My guess is 5."))
    observation = [message("user", "Higher.")]
    assert renderer.extend(prompt, whole[:-1], observation).ids == renderer.extend(prompt, whole, observation).ids


def test_smollm2s_default_system_message_is_matched_and_can_be_replaced(make_tokenizer: Any) -> None:
    renderer = ChatML(make_tokenizer(SMOLLM2_TEMPLATE))
    assert renderer.default_system == "You are a helpful AI assistant."
    own = renderer.start([message("system", "Play."), message("user", "Go.")])
    assert count(own, START) == 3
    assert count(renderer.start([message("user", "Go.")]), START) == 3


def test_other_stops_end_a_reply_too_and_the_end_of_turn_is_still_added(make_tokenizer: Any) -> None:
    renderer = ChatML(make_tokenizer(SMOLLM2_TEMPLATE, eos="<|endoftext|>"))
    assert renderer.stop_ids == (END, 0)
    sampled = [*renderer.encode_reply(message("assistant", "Hi."))[:-1], 0]
    assert renderer.parse(sampled).content == "Hi."
    prompt = renderer.start([message("user", "Go.")])
    ids = renderer.extend(prompt, sampled, [message("user", "x")]).ids
    assert ids[len(prompt) + len(sampled) - 1 : len(prompt) + len(sampled) + 1] == [0, END]


def test_tool_calls_are_read_out_of_a_reply_and_stay_in_its_text(renderer: Renderer) -> None:
    text = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    reply = renderer.parse(renderer.encode_reply(message("assistant", text)))
    assert reply.content == text
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("add", {"a": 2})]
    assert renderer.encode_reply(reply) == renderer.encode_reply(message("assistant", text))


def test_tool_calls_that_are_not_in_the_text_are_refused(renderer: Renderer) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    calls = renderer.parse(renderer.encode_reply(message("assistant", text))).tool_calls
    with pytest.raises(DataError, match="format_tool_call"):
        renderer.encode_reply(Message(role="assistant", content="", tool_calls=calls))


def test_a_written_dialogue_becomes_the_turns_of_a_rollout(renderer: Renderer) -> None:
    dialogue = [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]
    first, second = dialogue_to_turns(renderer, [*dialogue, message("user", "ignored")])
    assert list(first.prompt_ids) == renderer.start(dialogue[:1])
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.reply_ids)] == first.prompt_ids + first.reply_ids
    assert renderer.parse(second.reply_ids).content == "d"
    for broken in ([message("user", "a")], [message("assistant", "a")]):
        with pytest.raises(DataError):
            dialogue_to_turns(renderer, broken)


def test_a_template_that_is_not_chatml_is_refused_with_the_first_difference(make_tokenizer: Any) -> None:
    shouting = SMOLLM2_TEMPLATE.replace("message['content']", "message['content']|upper")
    with pytest.raises(ConfigError, match="use the renderer 'template'"):
        ChatML(make_tokenizer(shouting))


def test_a_tokenizer_without_chatmls_tokens_is_refused(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(None)
    assert ChatML(tokenizer).default_system is None  # no template: taken at its word
    broken = type("Broken", (), {"backend_tokenizer": None})()
    with pytest.raises(ConfigError, match="fast tokenizer"):
        ChatML(broken)


def test_no_messages_and_unknown_roles_are_refused(renderer: Renderer) -> None:
    with pytest.raises(DataError, match="no messages"):
        renderer.start([])
    with pytest.raises(DataError, match="narrator"):
        renderer.start([message("narrator", "Once")])


def test_text_that_is_no_text_is_refused(renderer: Renderer) -> None:
    with pytest.raises(DataError, match="cannot be encoded"):
        renderer.start([message("user", "\ud800")])
