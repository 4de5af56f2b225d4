"""Retrieval in other programs' files: the JSON of the paper's code, read and written."""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np

from ralm_jax.errors import RalmError
from ralm_jax.settings import QuerySettings
from ralm_jax.text import Text, parse_json, read_content, write_text
from ralm_jax.tokenizer import Tokenizer
from retrieval.corpus import Passage, PassageRows, Passages
from retrieval.query import make_queries
from retrieval.rows import field
from retrieval.table import RetrievalTable

MOST_TOKENS = 2**62


def import_json(path: str) -> tuple[RetrievalTable, Passages]:
    """The file that the paper's code writes, compressed or not: a list, one object a stride, with the passages' texts.

    Raises:
        UsageError: there is no such file.
        RalmError: not such a list, or its strides are not in their order; the entry and the field are named.
    """
    content = read_content(Path(path).expanduser())
    entries = parse_json(content, path)
    if not isinstance(entries, list) or not entries:
        raise RalmError(f"{path}: expected a list with an object a stride")
    numbers: dict[Passage, int] = {}
    begins, ends, futures, hits = [], [], [], []
    for i, entry in enumerate(entries):
        where = f"{path}: entry {i}"
        try:
            begins.append(int(entry["begin_location"]))
            ends.append(int(entry["end_location"]))
            futures.append(str(entry.get("future", "")))
            documents = [(document, float(document.get("score", 0))) for document in entry["retrieved_docs"]]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RalmError(f"{where} is not a stride of a retrieval file ({error!r})") from None
        after = ends[-2] if i else 0
        if not after <= begins[-1] < ends[-1] <= MOST_TOKENS:
            raise RalmError(f"{where} is tokens {begins[-1]} to {ends[-1]}, which is no stride from token {after} on")
        hits.append([
            (numbers.setdefault(Passage("", title, field(document, ["text"], where)), len(numbers)), score)
            for document, score in documents
            for title in [field(document, ["title"], where, default="")]
        ])  # fmt: skip
    k = max(1, *map(len, hits))
    rows, scores = np.full((len(hits), k), -1, np.int64), np.zeros((len(hits), k), np.float32)
    for j, found in enumerate(hits):
        rows[j, : len(found)] = [row for row, _ in found]
        scores[j, : len(found)] = [score for _, score in found]
    settings = {"json": sha256(content.encode()).hexdigest()}
    table = RetrievalTable(np.array(begins), np.array(ends), rows, scores, settings, {}, path, futures)
    return table, Passages.of([passage._replace(id=str(i)) for passage, i in numbers.items()])


def export_json(
    path: str,
    table: RetrievalTable,
    passages: PassageRows,
    text: Text,
    tokenizer: Tokenizer,
    retriever_tokenizer: Tokenizer | None = None,
) -> None:
    """Writes the table, made for `text` and `tokenizer`, as the file that the paper's `eval_lm.py` reads.

    Args:
        retriever_tokenizer: where queries were measured by it.

    Raises:
        RalmError: the file cannot be written.
    """
    tokens = tokenizer.encode(text.content)
    stated = {name: table.settings[name] for name in ("query_length", "query_tokens") if name in table.settings}
    made = QuerySettings(**stated)
    queries = make_queries(text, tokens, table.begins, made, tokenizer, retriever_tokenizer)
    entries = []
    for j, (begin, end) in enumerate(zip(table.begins.tolist(), table.ends.tolist(), strict=True)):
        found = table.rows[j] >= 0
        documents = zip(passages.contents(table.rows[j][found]), table.scores[j][found].tolist(), strict=True)
        entries.append(
            {
                "begin_location": begin,
                "end_location": end,
                "future": tokenizer.decode(tokens[begin:end]),
                "query": queries[j],
                "retrieved_docs": [{"text": contents, "score": score} for contents, score in documents],
            }
        )
    write_text(path, json.dumps(entries, indent=4, allow_nan=False) + "\n")
