"""Instruction tuning: what is learned of a conversation, the blend, and the command."""

import dataclasses
import json

import numpy as np
import pytest

from ralm_jax.cli import main
from ralm_jax.errors import RalmError
from ralm_jax.reader import load_reader
from ralm_jax.sharding import make_mesh
from tests import tiny
from train.instruct import Conversation, Conversations, blend, divide, encode, read_conversation, read_source

CONFIG = dataclasses.replace(tiny.LLAMA, num_layers=1, max_positions=64)
END = 2
TWO = Conversation("be du", "fa fe", (("da de", "ka ke"), ("do", "lo")))


def pieces(conversation):
    return "".join(prompt + answer for prompt, answer in conversation.pieces())


class TestConversations:
    def test_the_template(self):
        expected = "System: be du\n\nfa fe\n\nUser: da de\n\nAssistant: ka ke\n\nUser: do\n\nAssistant: lo"
        assert pieces(TWO) == expected
        assert pieces(Conversation("", "", (("da", "ka"),))) == "User: da\n\nAssistant: ka"

    def test_rows(self):
        turns = [("user", "da de"), ("assistant", "ka ke"), ("user", "do"), ("assistant", "lo")]
        messages = [{"role": role, "content": content} for role, content in turns]
        assert read_conversation({"system": "be du", "context": "fa fe", "messages": messages}, "f:1") == TWO
        system = {"role": "system", "content": "be du"}
        assert read_conversation({"context": "fa fe", "messages": [system, *messages]}, "f:1") == TWO
        assert read_conversation({"question": "da", "answer": "ka"}, "f:1").turns == (("da", "ka"),)

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ("da", "an object with a text 'system'"),
            ({"question": "da"}, "an object with a text 'answer'"),
            ({"question": "da", "answer": 3}, "an object with a text 'answer'"),
            ({"messages": "da"}, "'messages' is no list"),
            ({"messages": []}, "must be of user and assistant in turn"),
            ({"messages": [{"role": "user", "content": "da"}]}, "must be of user and assistant in turn"),
            ({"messages": [{"role": "assistant", "content": "da"}] * 2}, "must be of user and assistant in turn"),
            ({"messages": ["da"]}, "an object with a text 'role'"),
        ],
    )
    def test_what_is_no_conversation(self, row, message):
        with pytest.raises(RalmError, match=rf"f:1: .*{message}"):
            read_conversation(row, "f:1")

    @pytest.mark.parametrize("bos", [True, False])
    def test_answers_and_their_ends_are_learned_and_nothing_else(self, bos):
        tokenizer = tiny.tokenizer(bos=bos)
        tokens, learned = encode(TWO, tokenizer, END)
        first, second = (prompt for prompt, _ in TWO.pieces())
        expected = [
            *((token, False) for token in (*tokenizer.prefix, *tokenizer.encode(first))),
            *((token, True) for token in (*tokenizer.encode(" ka ke"), END)),
            *((token, False) for token in tokenizer.encode(second)),
            *((token, True) for token in (*tokenizer.encode(" lo"), END)),
        ]
        assert [*zip(tokens, learned, strict=True)] == expected

    def test_a_token_over_the_join_is_learned(self):
        """Byte-level: the answer's first token has the space in front of it."""
        tokenizer = tiny.trimming_tokenizer()
        tokens, learned = encode(Conversation("", "", (("da", "ka"),)), tokenizer, 1)
        assert tokenizer.decode(tokens[learned]) == " ka</s>"

    def test_a_label_is_weighed_where_it_is_predicted(self):
        one = encode(TWO, tiny.tokenizer(bos=True), END)
        batch = Conversations([one], 64)(0)
        real = len(one[0]) - 1
        np.testing.assert_array_equal(batch.tokens[:real], one[0][:-1])
        np.testing.assert_array_equal(batch.labels[batch.weight > 0], one[0][one[1]])
        assert batch.weight[real:].sum() == 0
        assert [len(part) for part in batch] == [64, 64, 64]


def rows_of(path, count, seed):
    rng = np.random.default_rng(seed)
    rows = [{"question": str(a), "answer": str(b)} for a, b in rng.choice(tiny.WORDS, (count, 2))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_has_no_room_is_counted(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "da", "answer": "ka"}, {"question": "da", "answer": tiny.text(99)}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_source(str(path), tiny.tokenizer(), END, 64)
    assert (len(found), found.left_out) == (1, 1)
    with pytest.raises(RalmError, match="none of its 2 conversations has room in 4 tokens"):
        read_source(str(path), tiny.tokenizer(), END, 4)


def test_the_blend_has_its_shares_and_goes_on_where_it_stopped(tmp_path):
    paths = [rows_of(tmp_path / f"{seed}.jsonl", count, seed) for seed, count in enumerate((5, 40))]
    sources = [read_source(path, tiny.tokenizer(), END, 64) for path in paths]
    straight = [*blend(sources, [0.75, 0.25], 8, 0, 0, 10)]
    own = {tuple(source(row).labels) for source in sources[:1] for row in range(len(source))}
    assert len(straight) == 10
    assert sum(tuple(labels) in own for batch in straight for labels in batch.labels) == pytest.approx(60, abs=2)
    later = [*blend(sources, [0.75, 0.25], 8, 0, 6, 10)]
    for left, right in zip(straight[6:], later, strict=True):
        np.testing.assert_array_equal(left.tokens, right.tokens)
    training, held = divide(sources[1], 0.1)
    assert (len(training), len(held)) == (36, 4)
    assert [len(part) for part in divide(sources[1], 0.0)] == [40, 0]


@pytest.fixture
def ralm(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*options):
        code = 0
        try:
            main(["train", "instruct", *map(str, options)])
        except SystemExit as stopped:
            code = stopped.code
        return code, capsys.readouterr()

    return run


@pytest.fixture
def command(tmp_path):
    tiny.edit_config(tiny.save_model(tmp_path / "llama", CONFIG, bos=True), eos_token_id=END)
    data = [rows_of(tmp_path / f"{seed}.jsonl", 20, seed) for seed in range(2)]
    return ["--model", tmp_path / "llama", "--data", *data, "--out", "out", "--steps", 4, "--batch-size", 8, "--mesh",
            "data=1", "--learning-rate", 1e-2, "--held-out", 0.1, "--check-every", 4]  # fmt: skip


def test_what_is_refused(tmp_path, ralm, command):
    for options, code, message in (
        (["--weights", 1], 2, "--weights must be 2 numbers above 0"),
        (["--window", 65], 2, "--window 65 is more than the 64 positions"),
        (["--model", tiny.save_model(tmp_path / "endless", CONFIG)], 1, "has no eos_token_id"),
    ):
        found, told = ralm(*command, *options)
        assert (found, told.err.count("\n")) == (code, 1), told.err
        assert message in told.err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_it_learns_the_answers(ralm, command):
    code, told = ralm(*command, "--weights", 3, 1)
    assert code == 0, told.err
    assert "0.jsonl: 20 conversations; 0 are longer than 64 tokens" in told.out
    losses = [float(line.split("held_out_loss ")[1].split(",")[0]) for line in told.out.splitlines() if "held_" in line]
    assert losses[-1] < losses[0]
    loaded, init = (load_reader(str(folder), mesh=make_mesh(data=1)) for folder in ("out/model", "llama"))
    assert (loaded.config, loaded.ends) == (init.config, (END,))
