"""Any chat template: the template's own first prompt, differences after it, and a word when history is rewritten."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from turnwise.errors import ConfigError, DataError
from turnwise.renderers import get_renderer
from turnwise.renderers.chatml import ChatML
from turnwise.renderers.template import TemplateRenderer
from turnwise.trajectory import Message

GENERATION = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

HEADERS = (  # as Llama 3 does: trimmed content, headers of special tokens, a begin-of-text
    "{{ '<|begin|>' }}{% for m in messages %}"
    "{{ '<|head|>' + m['role'] + '<|/head|>\n\n' + (m['content'] | trim) + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
HEADER_TOKENS = ("<|begin|>", "<|head|>", "<|/head|>", "<|eot|>")

TOOLS_IN_USER = (  # as Qwen2.5 does: tool messages are user messages with tags, runs of them joined
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m['content'] + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    + GENERATION
)

FORGETFUL = (  # as Qwen3 does: thinking goes from replies before the last user message
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m['content'] %}"
    "{% if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}" + GENERATION
)

OPENS_WITH_THINKING = FORGETFUL.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")

NO_END = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)

ONLY_USERS = (
    "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('only users') }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}" + GENERATION
)


def user(content: str) -> Message:
    return Message(role="user", content=content)


def assistant(content: str) -> Message:
    return Message(role="assistant", content=content)


def tool(content: str) -> Message:
    return Message(role="tool", content=content, name="add")


def template_ids(tokenizer: Any, *messages: Message) -> list[int]:
    plain = [{"role": m.role, "content": m.content} for m in messages]
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture(scope="session")
def headers(make_tokenizer: Any) -> Any:
    return make_tokenizer(HEADERS, special=HEADER_TOKENS, eos="<|eot|>")


@pytest.fixture(scope="session")
def headers_renderer(headers: Any) -> TemplateRenderer:
    chosen = get_renderer(headers)
    assert isinstance(chosen, TemplateRenderer)
    return chosen


def test_auto_takes_chatml_where_the_template_is_that_and_the_template_elsewhere(
    tiny_tokenizer: Any, make_tokenizer: Any
) -> None:
    assert isinstance(get_renderer(tiny_tokenizer), ChatML)
    for template in (TOOLS_IN_USER, FORGETFUL, ONLY_USERS):
        assert isinstance(get_renderer(make_tokenizer(template)), TemplateRenderer)
    assert isinstance(get_renderer(make_tokenizer(None)), ChatML)


def test_the_end_of_turn_is_read_from_the_template(headers: Any, headers_renderer: TemplateRenderer) -> None:
    end_id = headers.convert_tokens_to_ids("<|eot|>")
    assert headers_renderer.stop_ids == (end_id,)
    assert headers_renderer.encode_reply(assistant("4"))[-1] == end_id


contents = st.text(alphabet=st.characters(exclude_categories=["Cs", "Zs", "Cc", "Zl", "Zp"]), min_size=1, max_size=10)


@settings(max_examples=50, deadline=None)
@given(turns=st.lists(st.tuples(contents, contents), min_size=1, max_size=3))
def test_turn_by_turn_gives_what_the_template_gives_at_once(
    headers: Any, headers_renderer: TemplateRenderer, turns: list[tuple[str, str]]
) -> None:
    messages = [user("Go.")]
    prompt = headers_renderer.start(messages)
    for reply, answer in turns:
        sampled = headers_renderer.encode_reply(assistant(reply))
        extension = headers_renderer.extend(prompt, sampled, [user(answer)], history=messages)
        assert extension.is_append_only
        assert extension.ids[: len(prompt) + len(sampled)] == prompt + sampled
        prompt = extension.ids
        messages += [assistant(reply), user(answer)]
    assert prompt == template_ids(headers, *messages)


LOOK_ALIKES = ["<|eot|>", "<|head|>assistant<|/head|>\n\n", "<|begin|>", "<|im_end|>", "plain", "\U000f0000", " é"]


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.sampled_from(LOOK_ALIKES), min_size=1, max_size=6))
def test_what_somebody_writes_never_becomes_a_control_token(
    headers: Any, headers_renderer: TemplateRenderer, parts: list[str]
) -> None:
    text = "x" + "".join(parts) + "x"
    controls = set(headers.all_special_ids) | {headers.convert_tokens_to_ids(t) for t in HEADER_TOKENS}
    plain, odd = headers_renderer.start([user("x")]), headers_renderer.start([user(text)])
    assert [i for i in odd if i in controls] == [i for i in plain if i in controls]
    assert text in headers.decode(odd)
    sampled = headers_renderer.encode_reply(assistant(text))
    assert headers_renderer.parse(sampled).content == text
    added = headers_renderer.extend(plain, sampled, [user(text)]).ids[len(plain) + len(sampled) :]
    tame = headers_renderer.extend(plain, sampled, [user("x")]).ids[len(plain) + len(sampled) :]
    assert [i for i in added if i in controls] == [i for i in tame if i in controls]


def test_a_reply_that_was_cut_gets_its_end_of_turn_as_observation(headers_renderer: TemplateRenderer) -> None:
    prompt, whole = headers_renderer.start([user("Go.")]), headers_renderer.encode_reply(assistant("four"))
    assert (
        headers_renderer.extend(prompt, whole[:-1], [user("y")]).ids
        == headers_renderer.extend(prompt, whole, [user("y")]).ids
    )


def test_white_space_that_a_template_would_trim_stays_as_it_was_sampled(headers_renderer: TemplateRenderer) -> None:
    prompt, sampled = headers_renderer.start([user("Go.")]), headers_renderer.encode_reply(assistant("  four \n"))
    extension = headers_renderer.extend(prompt, sampled, [user("y")])
    assert extension.is_append_only
    assert extension.ids[: len(prompt) + len(sampled)] == prompt + sampled


def test_tool_messages_are_joined_as_the_template_joins_them(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(TOOLS_IN_USER)
    renderer = get_renderer(tokenizer)
    prompt, sampled = renderer.start([user("Go.")]), renderer.encode_reply(assistant("call"))
    extension = renderer.extend(prompt, sampled, [tool("1"), tool("2")])
    assert extension.is_append_only
    assert extension.ids == template_ids(tokenizer, user("Go."), assistant("call"), tool("1"), tool("2"))


def test_an_observation_may_quote_anything(make_tokenizer: Any) -> None:
    """Even the words of the base conversation."""
    tokenizer = make_tokenizer(TOOLS_IN_USER)
    renderer = get_renderer(tokenizer)
    quote = user("The reply of the base conversation. What is 2+2?")
    ids = renderer.extend(renderer.start([user("a")]), renderer.encode_reply(assistant("b")), [quote]).ids
    assert ids == template_ids(tokenizer, user("a"), assistant("b"), quote)


def test_a_template_that_forgets_thinking_splits_only_where_there_is_some(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    renderer = get_renderer(tokenizer)
    history = [user("Go.")]
    prompt = renderer.start(history)
    plain = renderer.extend(prompt, renderer.encode_reply(assistant("8")), [user("Higher.")], history=history)
    assert plain.is_append_only
    thought = assistant("<think>\nhm\n</think>\n\n8")
    anew = renderer.extend(prompt, renderer.encode_reply(thought), [user("Higher.")], history=history)
    assert not anew.is_append_only
    assert anew.ids == template_ids(tokenizer, user("Go."), assistant("8"), user("Higher."))


def test_thinking_inside_a_run_of_tool_calls_is_kept_until_the_user_speaks(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(FORGETFUL)
    renderer = get_renderer(tokenizer)
    history, thought = [user("Go.")], assistant("<think>\nhm\n</think>\n\ncall")
    prompt, sampled = renderer.start(history), renderer.encode_reply(thought)
    kept = renderer.extend(prompt, sampled, [tool("4")], history=history)
    assert kept.is_append_only
    assert kept.ids[: len(prompt) + len(sampled)] == prompt + sampled
    history += [thought, tool("4")]
    forgotten = renderer.extend(kept.ids, renderer.encode_reply(assistant("4")), [user("And?")], history=history)
    assert not forgotten.is_append_only
    assert forgotten.ids == template_ids(tokenizer, *history, assistant("4"), user("And?"))


@pytest.mark.parametrize("template", [OPENS_WITH_THINKING, NO_END])
def test_templates_that_never_keep_a_reply_as_sampled_render_every_prompt_anew(
    make_tokenizer: Any, template: str
) -> None:
    tokenizer = make_tokenizer(template)
    renderer = get_renderer(tokenizer)
    assert renderer.stop_ids == (2,)
    history = [user("Go.")]
    sampled = renderer.encode_reply(assistant("four"))
    extension = renderer.extend(renderer.start(history), sampled, [user("And?")], history=history)
    assert not extension.is_append_only
    assert extension.ids == template_ids(tokenizer, user("Go."), assistant("four"), user("And?"))
    with pytest.raises(DataError, match="history"):
        renderer.extend(renderer.start(history), sampled, [user("And?")])


def test_messages_that_a_template_refuses_are_named(make_tokenizer: Any) -> None:
    renderer = get_renderer(make_tokenizer(ONLY_USERS))
    with pytest.raises(DataError, match="tool: only users"):
        renderer.start([tool("4")])


def test_look_alikes_are_refused_where_they_cannot_be_encoded_exactly(make_tokenizer: Any) -> None:
    """A control token that takes in the white space after it: text around it cannot be encoded apart."""
    greedy = AddedToken("<|end|>", special=True, normalized=False, rstrip=True)
    template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    special = (greedy, "<|user|>", "<|assistant|>")
    renderer = get_renderer(make_tokenizer(template, special=special, eos="<|end|>"))
    prompt, sampled = renderer.start([user("Go.")]), renderer.encode_reply(assistant("4"))
    tokenizer = make_tokenizer(template, special=special, eos="<|end|>")
    extended = renderer.extend(prompt, sampled, [user("And?")])
    assert extended.is_append_only
    assert extended.ids == template_ids(tokenizer, user("Go."), assistant("4"), user("And?"))
    with pytest.raises(DataError, match="looks like a control token"):
        renderer.start([user("a <|end|> b")])


def test_a_tokenizer_without_a_template_is_refused(make_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        get_renderer(make_tokenizer(None), name="template")
