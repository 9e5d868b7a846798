"""Answer questions by searching a corpus.

    system     Answer the question. To look something up, write <search>words</search>. ...
    user       In which land was Anna Belford born?
    assistant  <search>Anna Belford</search>                            format 0.1: the first search that was readable
    user       <information>
               Doc 1: Anna Belford is a baker who was born in Norhaven in 1874.
               Doc 2: ...
               </information>
    assistant  <search>Norhaven</search>
    user       <information> ... Norhaven is a town in Selmark. ... </information>
    assistant  <answer>Selmark</answer>                                 outcome 1.0, terminated, a success

The first complete tag of a reply is its action; the rest is ignored, and so are closed <think> blocks. A reply without
a tag, or with an empty one, is flagged as unparsable and uses up a turn. After `max_turns` the attempt ends without
success. An answer is right if it equals a target after normalisation (`search_answers.py`). `reward=f1` pays for the
overlap of words instead; success still needs the exact match.

Passages come from an index in this process, or from a retriever server (`retriever_url`). They are observations, so
they are never trained on. If the retriever fails, the tool is blamed and the attempt is not scored.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple, Protocol

from turnwise.envs.base import EnvStep, Split, Task, as_action, system, user
from turnwise.envs.difficulty import Levels
from turnwise.envs.library.search_answers import exact_match, f1, normalise
from turnwise.envs.library.search_bridges import make_corpus_questions
from turnwise.envs.library.search_questions import QuestionKind, load_questions, make_questions, question_to_task
from turnwise.envs.scripted import play_demonstrations
from turnwise.envs.splits import draw, random_for
from turnwise.errors import AttemptFailed, ConfigError, Party
from turnwise.retriever.client import RetrieverClient
from turnwise.retriever.corpus import Corpus, Hit, read_corpus
from turnwise.retriever.dense import VectorKind
from turnwise.retriever.fiction import Fiction, draw_fiction
from turnwise.retriever.index import CorpusIndex, IndexKind, make_embedder, open_index
from turnwise.trajectory import Message

RULES = (
    "Answer the question. To look something up, write <search>words</search>. "
    "When you know it, write <answer>the answer</answer> in few words."
)
UNCLEAR = "Write <search>words</search> or <answer>the answer</answer>."
LAST_TURN = "Answer now."
NOTHING = "Nothing was found."

MAX_QUERY_CHARS = 500
QUICK_DOCUMENTS = 20_000
"""An index of at most this many passages answers in about a millisecond, so it is searched in the event loop."""

DEMONSTRATION_ROUNDS = 4
"""How often new dialogues are played for those that were left out."""
_NEXT_ROUND = 1_000_003

_ACTION = re.compile(r"<(search|answer)>([^<]*)</\1>")
_TAGS = re.compile(r"</?(?:search|answer|information|think)>")


class SearchAction(NamedTuple):
    """The action of a reply."""

    name: Literal["search", "answer"]
    text: str


def read_action(reply: str) -> SearchAction | None:
    """The first complete tag that is not empty. None if there is none."""
    found = _ACTION.search(_drop_thinking(reply))
    if found is None or not found[2].strip():
        return None
    return SearchAction("search" if found[1] == "search" else "answer", found[2].strip())


def _drop_thinking(reply: str) -> str:
    """Remove closed <think> blocks, because a tag inside them is not an action."""
    pieces: list[str] = []
    place = 0
    while (start := reply.find("<think>", place)) >= 0 and (end := reply.find("</think>", start)) >= 0:
        pieces.append(reply[place:start])
        place = end + len("</think>")
    return "".join([*pieces, reply[place:]])


def format_information(hits: Sequence[Hit], max_passage_chars: int) -> str:
    """The passages as text for the policy. A passage cannot close the tag around it."""
    texts = [_TAGS.sub("", hit.document.contents)[:max_passage_chars].strip() for hit in hits]
    lines = [f"Doc {number}: {text}" for number, text in enumerate(texts, start=1)] or [NOTHING]
    return "<information>\n" + "\n".join(lines) + "\n</information>"


class Retriever(Protocol):
    """Finds passages."""

    async def search(self, query: str, topk: int) -> Sequence[Hit]: ...


class LocalRetriever:
    """An index in this process."""

    def __init__(self, index: CorpusIndex, deadline_s: float) -> None:
        self._index = index
        self._deadline_s = deadline_s

    async def search(self, query: str, topk: int) -> Sequence[Hit]:
        if len(self._index.corpus.documents) <= QUICK_DOCUMENTS:
            return self._index.search(query, topk)
        work = asyncio.to_thread(self._index.search, query, topk)
        try:
            return await asyncio.wait_for(work, self._deadline_s)
        except TimeoutError as cause:
            raise AttemptFailed(Party.TOOL, f"retriever: no answer within {self._deadline_s:g} s") from cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The world `search`."""

    name: ClassVar[str] = "search"
    difficulties: ClassVar[Levels] = (
        {"kind": "one_hop"},
        {"kind": "two_hop"},
        {"kind": "comparison"},
    )

    kind: QuestionKind = "one_hop"
    """Kind of generated questions: one search, two searches that build on each other, a comparison, or all of these."""
    max_turns: int = 4
    topk: int = 2
    """Passages per search."""
    reward: Literal["exact_match", "f1"] = "exact_match"
    format_reward: float = 0.1
    """Reward for the first readable search of an attempt."""
    corpus_seed: int = 0
    """Seed of the invented corpus."""
    path: Path | None = None
    """Questions of a data set, instead of generated ones."""
    corpus: Path | None = None
    """Passages: JSON lines with id and contents. Without `path` the questions are made from them."""
    index: IndexKind = "bm25"
    """Kind of the index in this process."""
    encoder: str = "static"
    """What makes the vectors of a dense index: `static`, `minilm`, or a folder with a sentence encoder."""
    vectors: VectorKind = "auto"
    """How a dense index is searched: `flat`, `hnsw`, `ivf`, or by the number of passages."""
    index_cache: Path | None = None
    """A folder to store that index in."""
    retriever_url: str = ""
    """Address of a retriever server to use instead of an index in this process."""
    deadline_s: float = 10.0
    """Time limit of one search, with all tries."""
    max_passage_chars: int = 400
    max_tokens: int = 32
    _tasks: Mapping[Split, Sequence[Task]] = field(init=False, repr=False, compare=False)
    _retriever: Retriever = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("max_turns", "topk", "max_passage_chars", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}; expected at least 1")
        least = 1 if self.path is not None else 2 if self.kind == "one_hop" else 3
        if self.max_turns < least:
            raise ConfigError(
                f"max_turns={self.max_turns}; kind={self.kind} takes {least}: its searches and the answer"
            )
        if self.deadline_s <= 0:
            raise ConfigError(f"deadline_s={self.deadline_s:g}; expected more than 0 seconds")
        if self.index == "bm25" and (self.encoder != "static" or self.vectors != "auto"):
            raise ConfigError("encoder and vectors are not read with index=bm25; choose dense or hybrid")
        if self.corpus is not None and self.path is None and self.corpus_seed:
            raise ConfigError("corpus_seed is not read with corpus; it draws the invented corpus")
        if self.path is not None and self.corpus is None and not self.retriever_url:
            raise ConfigError(f"path={self.path} needs passages to search: set corpus or retriever_url")
        is_indexed_here = self.index != "bm25" or self.index_cache is not None
        if self.retriever_url and (is_indexed_here or (self.corpus is not None and self.path is not None)):
            raise ConfigError("corpus, index and index_cache are not read with retriever_url; the server has its own")
        corpus = read_corpus(self.corpus) if self.corpus is not None else None
        object.__setattr__(self, "_tasks", self._make_tasks(corpus))
        object.__setattr__(self, "_retriever", self._make_retriever(corpus))

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        return draw(self._tasks[split], count, random_for(self.name, split, seed))

    def make_env(self, task: Task, seed: int) -> SearchEnv:  # noqa: ARG002 - nothing is drawn in an attempt
        return SearchEnv(self, self._retriever, question=task.data["question"], targets=task.data["answers"])

    def demonstrations(self, count: int, seed: int) -> list[list[Message]]:
        """The searches that lead to the answer, then the answer. A data set has no such searches to show.

        A dialogue whose searches did not show the answer is left out: it would teach to guess.
        """
        found: list[list[Message]] = []
        if self.path is not None:
            return found
        for more in range(DEMONSTRATION_ROUNDS):
            if len(found) >= count:
                break
            found += filter(_shows_its_answer, play_demonstrations(self, _script, count, seed + more * _NEXT_ROUND))
        return found[:count]

    def _make_tasks(self, corpus: Corpus | None) -> Mapping[Split, Sequence[Task]]:
        if self.path is not None:
            return load_questions(self.path)
        if corpus is not None:
            questions = make_corpus_questions(corpus.documents, self.kind)
        else:
            questions = make_questions(_fiction(self.corpus_seed), self.kind)
        splits: tuple[Split, Split] = ("train", "test")
        return {split: [question_to_task(one) for one in questions if one.split == split] for split in splits}

    def _make_retriever(self, corpus: Corpus | None) -> Retriever:
        if self.retriever_url:
            return RetrieverClient(url=self.retriever_url, deadline_s=self.deadline_s)
        corpus = corpus or Corpus.of(_fiction(self.corpus_seed).documents)
        embedder = None if self.index == "bm25" else make_embedder(self.encoder)
        index, _ = open_index(corpus, self.index, cache=self.index_cache, embedder=embedder, vectors=self.vectors)
        return LocalRetriever(index, self.deadline_s)


class SearchEnv:
    """One question."""

    def __init__(self, world: Search, retriever: Retriever, *, question: str, targets: Sequence[str]) -> None:
        self._world = world
        self._retriever = retriever
        self._question = question
        self._targets = targets
        self._turn = 0
        self._num_searches = 0
        self._found: frozenset[str] = frozenset()
        """Ids of the passages that were shown."""

    async def start(self) -> list[Message]:
        return [system(RULES), user(self._question)]

    async def step(self, reply: Message) -> EnvStep:
        self._turn += 1
        action = read_action(reply.content)
        if action is None:
            return self._go_on(UNCLEAR, is_unparsable=True)
        return self._judge(action.text) if action.name == "answer" else as_action(await self._search(action.text))

    async def close(self) -> None:
        pass

    def state_key(self) -> str:
        """The passages shown so far, and the number of turns played. The words of the searches do not matter."""
        return f"turn {self._turn} knows {','.join(sorted(self._found)) or 'nothing'}"

    def fork(self) -> SearchEnv:
        return copy.copy(self)  # only numbers, a frozen set, and a retriever without state

    async def _search(self, query: str) -> EnvStep:
        hits = await self._retriever.search(query[:MAX_QUERY_CHARS], self._world.topk)
        is_first = self._num_searches == 0
        self._num_searches += 1
        self._found |= {hit.document.id for hit in hits}
        text = format_information(hits, self._world.max_passage_chars)
        return self._go_on(text, format_reward=self._world.format_reward if is_first else 0.0)

    def _judge(self, answer: str) -> EnvStep:
        is_right, overlap = exact_match(answer, self._targets), f1(answer, self._targets)
        outcome = float(is_right) if self._world.reward == "exact_match" else overlap
        return EnvStep(
            reward={"outcome": outcome},
            terminated=True,
            is_success=is_right,
            info={"searches": self._num_searches, "f1": overlap},
            labels={"answer": normalise(answer)},
        )

    def _go_on(self, text: str, *, format_reward: float = 0.0, is_unparsable: bool = False) -> EnvStep:
        is_last = self._turn >= self._world.max_turns
        if self._turn == self._world.max_turns - 1:
            text = f"{text}\n{LAST_TURN}"
        return EnvStep(
            messages=[user(text)],
            reward={"format": format_reward} if format_reward else {"outcome": 0.0},
            terminated=is_last,
            is_success=False if is_last else None,
            is_unparsable=is_unparsable,
            info={"searches": self._num_searches, "f1": 0.0} if is_last else {},
        )


def _shows_its_answer(dialogue: Sequence[Message]) -> bool:
    """Whether the answer is in what was found, and not only in the question."""
    answer = read_action(dialogue[-1].content)
    found = " ".join(message.content for message in dialogue[2:] if message.role == "user")
    return answer is not None and normalise(answer.text) in normalise(found)


def _script(task: Task) -> _Script:
    return _Script(task.data["searches"], task.data["answers"][0])


class _Script:
    """A player that makes the searches in order, then answers."""

    def __init__(self, searches: Sequence[str], answer: str) -> None:
        replies = [*(f"<search>{query}</search>" for query in searches), f"<answer>{answer}</answer>"]
        self._replies = iter(replies)

    def __call__(self, dialogue: Sequence[Message]) -> str:  # noqa: ARG002 - the script knows what to say
        return next(self._replies)


@functools.lru_cache(maxsize=4)
def _fiction(seed: int) -> Fiction:
    return draw_fiction(seed)
