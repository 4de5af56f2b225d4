"""Embeddings over HTTP, against a server in the test: batches, retries, cache, and a key that goes nowhere."""

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from ralm_jax import cli, openai_client
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.openai_client import cache_file
from retrieval import openai
from retrieval.embedder import load_embedder
from retrieval.openai import OpenAIEmbedder
from tests import tiny
from tests.api import KEY, assert_secret, serving
from tests.test_cli import refused

pytest.importorskip("openai", reason="needs the package openai (make test installs it)")


def vector(text, size=12):
    """What the server makes of a text; not of length 1."""
    seed = int.from_bytes(sha256(text.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).normal(size=size).astype(np.float32) * 3


def expected(texts):
    vectors = np.stack([vector(text) for text in texts])
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def reply(path, asked):
    data = [{"object": "embedding", "index": i, "embedding": vector(text).tolist()}
            for i, text in enumerate(asked["input"])]  # fmt: skip
    return {"object": "list", "model": asked["model"], "data": data[::-1], "usage": {}}


@pytest.fixture
def server(tmp_path, monkeypatch):
    with serving(reply, tmp_path, monkeypatch) as made:
        yield made


def test_vectors_of_length_one_in_the_order_of_the_texts(server):
    texts = [tiny.text(5, seed) for seed in range(30)]
    embedder = load_embedder("openai:small")
    np.testing.assert_allclose(embedder.embed(texts), expected(texts), atol=1e-6)
    assert embedder.dimension == 12
    assert server.keys == {f"Bearer {KEY}"}
    assert server.asked[0]["model"] == "small"
    assert embedder.embed([]).shape == (0, 12)


def test_batches_and_cache(server, monkeypatch):
    monkeypatch.setattr(openai, "BATCH", 8)
    texts = [f"text {i % 20}" for i in range(30)]
    first = OpenAIEmbedder("small").embed(texts)
    assert max(len(asked["input"]) for asked in server.asked) <= 8
    assert Counter(text for asked in server.asked for text in asked["input"]) == Counter(set(texts))  # each but once
    count = len(server.asked)
    np.testing.assert_array_equal(OpenAIEmbedder("small").embed(texts[::-1]), first[::-1])
    assert len(server.asked) == count
    OpenAIEmbedder("large").embed(texts[:1])  # another model has vectors of its own
    assert server.asked[count]["model"] == "large"


def test_retried(server):
    server.failures = [(429, {"error": {"message": "slow down"}}), (500, {"error": {"message": "oops"}})]
    np.testing.assert_allclose(OpenAIEmbedder("small").embed(["a"]), expected(["a"]), atol=1e-6)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {"error": {"message": f"Incorrect key {KEY}"}}), "openai:small: Error code: 401"),
        ((404, {"error": {"message": "no such model"}}), "openai:small: Error code: 404.*no such model"),
        ((200, {"object": "list", "data": []}), "did not answer with a vector for each text"),
        ((200, {"object": "list", "data": [{"index": 0, "embedding": [0.0, 0.0]}]}), "with a vector for each text"),
        ((200, {"object": "list", "data": [{"index": 0, "embedding": "x"}]}), "with a vector for each text"),
        ((200, {"nothing": 1}), "with a vector for each text"),
    ],
)
def test_refusals(server, answer, message, caplog):
    server.failures = [answer]
    with pytest.raises((RalmError,), match=message) as caught:
        OpenAIEmbedder("small").embed(["a"])
    assert KEY not in str(caught.value)
    assert KEY not in caplog.text


def test_no_server(server, monkeypatch):
    monkeypatch.setattr(openai_client, "RETRIES", 0)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    with pytest.raises(RalmError, match="openai:small: Connection error"):
        OpenAIEmbedder("small").embed(["a"])


def test_a_request_that_cannot_be_met(server, monkeypatch):
    with pytest.raises(UsageError, match="pooling and dtype are the server's"):
        load_embedder("openai:small", pooling="cls")
    with pytest.raises(UsageError, match="name a model"):
        load_embedder("openai:")
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(UsageError, match="OPENAI_API_KEY is not set"):
        load_embedder("openai:small")


def test_without_the_package(server, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UsageError, match=r"not installed: pip install 'ralm-jax\[openai\]'"):
        load_embedder("openai:small")


def test_a_damaged_cache(server):
    cache_file("embeddings").write_bytes(b"not a database" * 100)
    with pytest.raises(RalmError, match=r"embeddings\.sqlite: the cache of embeddings cannot be used"):
        OpenAIEmbedder("small").embed(["a"])


def test_commands(server, tmp_path, monkeypatch, corpus_file, capsys):
    monkeypatch.chdir(tmp_path)
    cli.main(["index", "--corpus", "corpus.jsonl", "--engine", "dense", "--encoder", "openai:small", "--out", "index"])
    row = tiny.passages(40)[7]
    contents = f"{row['title']}\n{row['text']}"
    cli.main(["search", "--index", "index", "--query", contents, "--k", "3", "--json", "hits.json"])
    hits = json.loads(Path("hits.json").read_text())["hits"]
    assert hits[0]["id"] == "7"
    assert hits[0]["score"] == pytest.approx(1, abs=0.01)
    assert_secret(tmp_path, server)
    monkeypatch.delenv("OPENAI_API_KEY")
    code, line = refused(capsys, "search", "--index", "index", "--query", "a")
    assert (code, "OPENAI_API_KEY is not set" in line) == (2, True)
