"""gsm8k, nq and hotpotqa: questions with answers, and HotpotQA's passages as a corpus."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from turnwise.envs.library.gsm8k_multi_turn import read_answer
from turnwise.envs.prepare.folder import Preparation
from turnwise.envs.rows import Row
from turnwise.errors import ConfigError

IN_BOTH = "held-out questions that are also in the training split"


def prepare_gsm8k(work: Preparation) -> str:
    """`train.jsonl` and `test.jsonl` of the authors, or the parquet files of the hub."""

    def read(row: Row, where: str) -> Mapping[str, Any]:
        question, answer = _text(row, "question", where), _text(row, "answer", where)
        if read_answer(answer) is None:
            raise ConfigError(f"{where}: the answer has no `#### number`; expected GSM8K's own rows")
        return {"question": question, "answer": answer}

    patterns = ("{split}.jsonl", "main/{split}-*.parquet", "{split}-*.parquet", "**/{split}.jsonl")
    _write_splits(work, {split: [one.format(split=split) for one in patterns] for split in ("train", "test")}, read)
    return "turnwise train gsm8k_multi_turn env.options.path={target}"


def prepare_nq(work: Preparation) -> str:
    """NQ-open: `NQ-open.train.jsonl` and `NQ-open.dev.jsonl`, rows with `question` and a list `answer`."""

    def read(row: Row, where: str) -> Mapping[str, Any]:
        question, answers = _text(row, "question", where), row.get("answer", row.get("golden_answers"))
        if not isinstance(answers, list) or not all(isinstance(one, str) for one in cast(list[object], answers)):
            raise ConfigError(f"{where}: answer is {answers!r:.40}; expected a list of texts")
        return {"question": question, "golden_answers": answers}

    files: dict[str, list[str]] = {}
    for split, names in (("train", ("train",)), ("test", ("dev", "efficientqa.test.1.1", "test", "validation"))):
        files[split] = [pattern for name in names for pattern in (f"NQ-open.{name}.jsonl", f"{name}.jsonl")]
        files[split] += [f"**/{name}-*.parquet" for name in names]
    _write_splits(work, files, read)
    return "turnwise train search env.options.path={target} env.options.corpus=PASSAGES.jsonl"


def prepare_hotpotqa(work: Preparation) -> str:
    """`hotpot_train_v1.1.json` and a dev file. Every paragraph of a context becomes a passage of `corpus.jsonl`."""
    passages: dict[str, str] = {}

    def read(row: Row, where: str) -> Mapping[str, Any]:
        question, answer = _text(row, "question", where), _text(row, "answer", where)
        for title, text in _paragraphs(row, where):
            passages.setdefault(title, text)
        return {"question": question, "answer": answer, "type": row.get("type"), "level": row.get("level")}

    files = {
        "train": ("hotpot_train_v1.1.json", "hotpot_train*.json"),
        "test": ("hotpot_dev_distractor_v1.json", "hotpot_dev_fullwiki_v1.json", "hotpot_dev*.json"),
    }
    _write_splits(work, files, read)
    corpus = [{"id": str(n), "contents": f'"{title}"\n{text}'} for n, (title, text) in enumerate(passages.items())]
    work.write_lines("corpus.jsonl", corpus)
    return "turnwise train search env.options.path={target} env.options.corpus={target}/corpus.jsonl"


def _write_splits(
    work: Preparation, files: Mapping[str, Sequence[str]], read: Callable[[Row, str], Mapping[str, Any]]
) -> None:
    """Write the rows of each split to `SPLIT.jsonl`, without held-out questions that are trained on.

    Args:
        files: By split, the patterns of the file that it is in; the first that fits counts.
        read: Makes our row of one of theirs. Its second argument names the row in an error.
    """
    seen: set[str] = set()
    for split, patterns in files.items():
        path, rows = work.rows(*patterns, what=f"{split} split")
        ours = [read(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]
        kept = [row for row in ours if row["question"] not in seen]
        for _ in range(len(ours) - len(kept)):
            work.drop(IN_BOTH)
        work.write_lines(f"{split}.jsonl", kept)
        seen |= {row["question"] for row in ours}


def _paragraphs(row: Row, where: str) -> list[tuple[str, str]]:
    context: Any = row.get("context")
    if isinstance(context, Mapping):  # as on the hub: two lists side by side
        both = cast(Mapping[str, Any], context)
        context = list(zip(both.get("title", []), both.get("sentences", []), strict=False))
    try:
        return [(str(title), " ".join(str(one).strip() for one in sentences)) for title, sentences in context]
    except (TypeError, ValueError) as cause:
        expected = '[["title", ["sentence", ...]], ...]'
        raise ConfigError(f"{where}: the context cannot be read; expected {expected}") from cause


def _text(row: Row, name: str, where: str) -> str:
    found = row.get(name)
    if not isinstance(found, str) or not found.strip():
        raise ConfigError(f"{where}: {name} is {found!r:.40}; expected text. It has {', '.join(row)}")
    return found.strip()
