"""gsm8k, nq and hotpotqa: questions with answers, and HotpotQA's passages as a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from turnwise.envs.library.gsm8k_multi_turn import read_answer
from turnwise.envs.prepare.folder import Preparation
from turnwise.envs.rows import Row
from turnwise.errors import ConfigError

IN_BOTH = "held-out questions that are also in the training split"


def prepare_gsm8k(work: Preparation) -> str:
    """`train.jsonl` and `test.jsonl` of the authors, or the parquet files of the hub."""
    seen: set[str] = set()
    for split in ("train", "test"):
        patterns = (f"{split}.jsonl", f"main/{split}-*.parquet", f"{split}-*.parquet", f"**/{split}.jsonl")
        path, rows = work.rows(*patterns, what=f"{split} split")
        kept: list[Mapping[str, str]] = []
        for number, row in enumerate(rows, start=1):
            question, answer = _text(row, "question", path, number), _text(row, "answer", path, number)
            if read_answer(answer) is None:
                raise ConfigError(f"{path}, row {number}: the answer has no `#### number`; expected GSM8K's own rows")
            kept.append({"question": question, "answer": answer})
        work.write_lines(f"{split}.jsonl", _without(kept, seen, work))
        seen |= {row["question"] for row in kept}
    return "turnwise train gsm8k_multi_turn env.options.path={target}"


def prepare_nq(work: Preparation) -> str:
    """NQ-open: `NQ-open.train.jsonl` and `NQ-open.dev.jsonl`, rows with `question` and a list `answer`."""
    seen: set[str] = set()
    for split, names in (("train", ("train",)), ("test", ("dev", "efficientqa.test.1.1", "test", "validation"))):
        patterns = [pattern for name in names for pattern in (f"NQ-open.{name}.jsonl", f"{name}.jsonl")]
        patterns += [f"**/{name}-*.parquet" for name in names]
        path, rows = work.rows(*patterns, what=f"{split} split")
        kept: list[Mapping[str, Any]] = []
        for number, row in enumerate(rows, start=1):
            question, answers = _text(row, "question", path, number), row.get("answer", row.get("golden_answers"))
            if not isinstance(answers, list) or not all(isinstance(one, str) for one in cast(list[object], answers)):
                raise ConfigError(f"{path}, row {number}: answer is {answers!r:.40}; expected a list of texts")
            kept.append({"question": question, "golden_answers": answers})
        work.write_lines(f"{split}.jsonl", _without(kept, seen, work))
        seen |= {row["question"] for row in kept}
    return "turnwise train search env.options.path={target} env.options.corpus=PASSAGES.jsonl"


def prepare_hotpotqa(work: Preparation) -> str:
    """`hotpot_train_v1.1.json` and a dev file. Every paragraph of a context becomes a passage of `corpus.jsonl`."""
    seen: set[str] = set()
    passages: dict[str, str] = {}
    files = {
        "train": ("hotpot_train_v1.1.json", "hotpot_train*.json"),
        "test": ("hotpot_dev_distractor_v1.json", "hotpot_dev_fullwiki_v1.json", "hotpot_dev*.json"),
    }
    for split, patterns in files.items():
        path, rows = work.rows(*patterns, what=f"{split} split")
        kept: list[Mapping[str, Any]] = []
        for number, row in enumerate(rows, start=1):
            question, answer = _text(row, "question", path, number), _text(row, "answer", path, number)
            kept.append({"question": question, "answer": answer, "type": row.get("type"), "level": row.get("level")})
            for title, text in _paragraphs(row, path, number):
                passages.setdefault(title, text)
        work.write_lines(f"{split}.jsonl", _without(kept, seen, work))
        seen |= {row["question"] for row in kept}
    corpus = [{"id": str(n), "contents": f'"{title}"\n{text}'} for n, (title, text) in enumerate(passages.items())]
    work.write_lines("corpus.jsonl", corpus)
    return "turnwise train search env.options.path={target} env.options.corpus={target}/corpus.jsonl"


def _paragraphs(row: Row, path: Path, number: int) -> list[tuple[str, str]]:
    context: Any = row.get("context")
    if isinstance(context, Mapping):  # as on the hub: two lists side by side
        both = cast(Mapping[str, Any], context)
        context = list(zip(both.get("title", []), both.get("sentences", []), strict=False))
    try:
        return [(str(title), " ".join(str(one).strip() for one in sentences)) for title, sentences in context]
    except (TypeError, ValueError) as cause:
        expected = '[["title", ["sentence", ...]], ...]'
        raise ConfigError(f"{path}, row {number}: the context cannot be read; expected {expected}") from cause


def _text(row: Row, name: str, path: Path, number: int) -> str:
    found = row.get(name)
    if not isinstance(found, str) or not found.strip():
        raise ConfigError(f"{path}, row {number}: {name} is {found!r:.40}; expected text. It has {', '.join(row)}")
    return found.strip()


def _without(rows: Sequence[Mapping[str, Any]], seen: set[str], work: Preparation) -> list[Mapping[str, Any]]:
    kept = [row for row in rows if row["question"] not in seen]
    for _ in range(len(rows) - len(kept)):
        work.drop(IN_BOTH)
    return kept
