"""`turnwise retriever`: serve a corpus to search agents, or write the invented one to a file."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.retriever.corpus import read_corpus, write_corpus

DEFAULT_PORT = 8000

_EXAMPLES = """\
examples:
  turnwise retriever corpus fiction.jsonl           write the passages of the world `search`
  turnwise retriever serve --corpus fiction.jsonl   answer POST /retrieve on http://127.0.0.1:8000
  turnwise retriever serve --corpus wiki.jsonl --index hybrid --port 8100
  turnwise train search env.options.retriever_url=http://127.0.0.1:8000

A corpus is a file of JSON lines: {"id": ..., "contents": ...}
"""


def add_parser(subparsers: Any) -> None:
    """Add `retriever` to the command line's subcommands."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "retriever",
        help="serve a corpus to search agents",
        description="Serve a corpus to search agents, over HTTP.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(parser=parser)
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    _add_serve(actions.add_parser("serve", help="answer POST /retrieve over a corpus"))
    corpus = actions.add_parser("corpus", help="write the invented corpus of the world `search`")
    corpus.add_argument("file", help="the JSON lines file to write")
    corpus.add_argument(
        "--seed", type=int, default=0, help="seed of the corpus; env.options.corpus_seed of the world (default 0)"
    )


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--corpus", required=True, metavar="FILE", help="the passages: JSON lines with id and contents")
    parser.add_argument(
        "--index", choices=("bm25", "dense", "hybrid"), default="bm25", help="kind of index (default bm25)"
    )
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
    parser.add_argument(
        "--cache",
        default="",
        metavar="DIR",
        help="directory for indexes (default: the model store); `none` stores nothing",
    )


def run(options: argparse.Namespace, *, default_cache: Path) -> int:
    if options.action == "serve":
        return _serve(options, _cache(options.cache, default_cache))
    if options.action == "corpus":
        from turnwise.retriever.fiction import draw_fiction

        target = Path(options.file).expanduser()
        if not target.parent.is_dir():
            raise ConfigError(f"there is no folder {target.parent}; make it first, or name another file")
        print(f"{write_corpus(target, draw_fiction(options.seed).documents)} passages in {target}")
        return 0
    options.parser.print_help()
    return 0


def _serve(options: argparse.Namespace, cache: Path | None) -> int:
    try:
        import uvicorn

        from turnwise.retriever.server import ServerLimits, make_app
    except ImportError as cause:
        raise ConfigError(f"the retriever server needs {cause.name}: pip install 'turnwise[retriever]'") from cause
    from turnwise.retriever.index import open_index

    limits = ServerLimits(default_topk=options.topk, deadline_s=options.deadline)
    corpus = read_corpus(options.corpus)
    listener = _listen(options.host, options.port)
    try:
        index, was_kept = open_index(corpus, options.index, cache=cache)
        host, port = listener.getsockname()[:2]
        how = "kept index" if was_kept else "indexed now"
        print(
            f"retriever: {len(corpus.documents)} passages, {options.index} ({how}), on http://{_bracket(host)}:{port}",
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
