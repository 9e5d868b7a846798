"""Finds passages of a corpus: BM25, dense vectors, or both; in this process or behind an HTTP address.

    corpus.py       passages out of a file, id and contents per line
    fiction.py      a small invented corpus, drawn from a seed
    geography.py    cities and countries, from a package
    embeddings.py   text to vectors, with a model that comes inside its package
    sentence_encoder.py   the same with a transformer, in numpy
    lexical.py      BM25                        (package `bm25s`)
    dense.py        nearest vectors             (package `faiss`)
    index.py        one of them, or both fused; kept on disk under a checksum
    server.py       POST /retrieve and GET /health
    client.py       the other end of /retrieve
    cli.py          `turnwise retriever ...`

Everything but `fiction`, `corpus` and `client` needs the extra: pip install 'turnwise[retriever]'.
"""
