"""Loading from every kind of file, one explicit policy for special tokens, and text that comes back as it went in."""

import io
import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import sentencepiece

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.tokenizer import load_tokenizer
from tests import tiny

TEXT = "Ünïcode, digits 2024 and 日本 \U0001f600\n\n  two  spaces <unk> 's"


def save(folder, *, bos=False, **config):
    folder.mkdir(exist_ok=True)
    tiny.backend(bos=bos).save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def byte_level_files(folder, **config):
    """GPT-2's vocab.json and merges.txt, with only the bytes and two merges."""
    from tokenizers import pre_tokenizers

    folder.mkdir(exist_ok=True)
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġt", "Ġth", "<|endoftext|>", "</s>"]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("#version: 0.2\nĠ t\nĠt h\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


class TestSpecialTokens:
    def test_encode_adds_none(self, tmp_path):
        tokenizer = load_tokenizer(save(tmp_path / "t", bos=True))
        assert tokenizer.encode("ba be").tolist() == [5, 3, 6]
        assert tokenizer.encode("ba be").dtype == np.int32

    def test_a_template_says_what_is_added(self, tmp_path):
        tokenizer = load_tokenizer(save(tmp_path / "t", bos=True))
        assert (tokenizer.prefix, tokenizer.suffix) == ((1,), (2,))

    def test_it_does_not_matter_which_token_shows_it(self, tmp_path):
        """The first token of a vocabulary is often one of those added; files may ask for padding and truncation too."""
        from tokenizers import Tokenizer, models, processors

        backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
        backend.add_special_tokens(["<s>", "</s>"])
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        backend.enable_padding(length=10)
        backend.enable_truncation(5)
        backend.save(str(tmp_path / "tokenizer.json"))
        for _ in range(20):  # the library lists a vocabulary in random order
            tokenizer = load_tokenizer(str(tmp_path))
            assert (tokenizer.prefix, tokenizer.suffix) == ((0,), (1,))

    def test_null_is_not_a_statement(self, tmp_path):
        tokenizer = load_tokenizer(save(tmp_path / "t", bos=True, add_bos_token=None, add_eos_token=None))
        assert (tokenizer.prefix, tokenizer.suffix) == ((1,), (2,))

    def test_more_than_one_token_in_front_is_no_bos(self, tmp_path):
        tokenizer = load_tokenizer(save(tmp_path / "t", bos=True))
        assert tokenizer.bos == 1
        with pytest.raises(RalmError, match="puts 2 tokens in front of a text"):
            _ = replace(tokenizer, prefix=(1, 2)).bos

    def test_template_and_flag_do_not_double_bos(self, tmp_path):
        tokenizer = load_tokenizer(save(tmp_path / "t", bos=True, add_bos_token=True, bos_token="<s>"))
        assert tokenizer.prefix == (1,)

    def test_the_flag_decides_where_it_is_stated(self, tmp_path):
        assert load_tokenizer(save(tmp_path / "a", bos=True, add_bos_token=False)).prefix == ()
        assert load_tokenizer(save(tmp_path / "b", add_bos_token=True, bos_token={"content": "<s>"})).prefix == (1,)
        assert load_tokenizer(save(tmp_path / "c", add_eos_token=True, eos_token="</s>")).suffix == (2,)

    def test_nothing_is_added_without_template_or_flag(self, tmp_path):
        tokenizer = load_tokenizer(save(tmp_path / "t"))
        assert (tokenizer.prefix, tokenizer.suffix) == ((), ())

    def test_gpt2_files_add_none_and_opt_files_add_bos(self, tmp_path):
        assert load_tokenizer(byte_level_files(tmp_path / "gpt2")).prefix == ()
        opt = load_tokenizer(byte_level_files(tmp_path / "opt", add_bos_token=True, bos_token="</s>"))
        assert opt.prefix == (opt.backend.token_to_id("</s>"),)

    def test_a_bos_that_is_not_in_the_vocabulary(self, tmp_path):
        with pytest.raises(RalmError, match="adds bos_token = '<bos>', which its vocabulary does not have"):
            load_tokenizer(save(tmp_path / "t", add_bos_token=True, bos_token="<bos>"))


class TestFiles:
    def test_byte_level(self, tmp_path):
        tokenizer = load_tokenizer(byte_level_files(tmp_path / "t"))
        ids = tokenizer.encode(TEXT + " the<|endoftext|>")
        assert tokenizer.decode(ids) == TEXT + " the<|endoftext|>"
        assert ids[-1] == tokenizer.backend.token_to_id("<|endoftext|>")

    def test_a_files_truncation_and_padding_are_switched_off(self, tmp_path):
        backend = tiny.backend()
        backend.enable_truncation(4)
        backend.enable_padding(length=10)
        backend.save(str(tmp_path / "tokenizer.json"))
        assert len(load_tokenizer(str(tmp_path)).encode("ba be bi bo bu")) == 9

    def test_naming_the_file_names_the_folder(self, tmp_path):
        folder = save(tmp_path / "t", bos=True)
        assert load_tokenizer(f"{folder}/tokenizer.json").fingerprint == load_tokenizer(folder).fingerprint

    @pytest.mark.parametrize("content", ["[1]", "{", '"x"'])
    def test_a_damaged_tokenizer_config(self, tmp_path, content):
        save(tmp_path / "t")
        (tmp_path / "t" / "tokenizer_config.json").write_text(content)
        with pytest.raises(RalmError, match=r"tokenizer_config\.json: (not JSON|expected a JSON object)"):
            load_tokenizer(str(tmp_path / "t"))

    def test_offsets_are_characters(self, tmp_path):
        tokenizer = load_tokenizer(byte_level_files(tmp_path / "t"))
        ids, offsets = tokenizer.encode_with_offsets("aé b")
        assert len(ids) == len(offsets) == 5
        assert offsets[-1].tolist() == [3, 4]

    def test_no_tokenizer(self, tmp_path):
        with pytest.raises(UsageError, match="no tokenizer"):
            load_tokenizer(str(tmp_path))

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
    def test_damaged(self, tmp_path, name):
        (tmp_path / name).write_text("{")
        with pytest.raises(RalmError, match=name):
            load_tokenizer(str(tmp_path))

    def test_text_that_the_vocabulary_cannot_hold(self, tmp_path):
        from tokenizers import Tokenizer, models

        Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>")).save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(RalmError, match="cannot encode the text"):
            load_tokenizer(str(tmp_path)).encode("b")

    def test_fingerprints_tell_vocabularies_and_policies_apart(self, tmp_path):
        made = [save(tmp_path / "a"), save(tmp_path / "b", bos=True), byte_level_files(tmp_path / "c")]
        assert len({load_tokenizer(folder).fingerprint for folder in made}) == 3
        assert load_tokenizer(made[0]).fingerprint == load_tokenizer(save(tmp_path / "d")).fingerprint


def train(folder, **options):
    """Trains a small SentencePiece model: by default one of LLaMA's kind, BPE with byte fallback."""
    sentences = [" ".join(row["text"].split()) + " 1234 the cat sat on the mat" for row in tiny.passages(200)]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=out,
        minloglevel=2,
        **{
            "vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "character_coverage": 0.99,
            "split_digits": True, "add_dummy_prefix": True, "remove_extra_whitespaces": False,
            "normalization_rule_name": "identity",
        }
        | options,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("sp"))


SENTENCES = ["the cat sat", " leading", "two  spaces", "日本 \U0001f600", "ba 1234 bi\nnew", "matmat  the"]


class TestSentencePiece:
    def test_the_same_tokens_as_sentencepiece(self, trained):
        processor = sentencepiece.SentencePieceProcessor(str(trained / "tokenizer.model"))
        tokenizer = load_tokenizer(str(trained))
        for text in SENTENCES:
            assert tokenizer.encode(text).tolist() == processor.encode(text), text
            assert tokenizer.decode(tokenizer.encode(text)) == text

    @pytest.mark.parametrize(
        "options",
        [
            {"model_type": "unigram", "vocab_size": 330},
            {"add_dummy_prefix": False},
            {"remove_extra_whitespaces": True},
            {"normalization_rule_name": "nmt_nfkc"},
        ],
    )
    def test_models_of_another_kind_are_refused(self, tmp_path, options):
        with pytest.raises(RalmError, match="not a BPE model of LLaMA's kind"):
            load_tokenizer(str(train(tmp_path, **options)))

    def test_bos_by_default(self, trained):
        assert load_tokenizer(str(trained)).prefix == (1,)

    def test_through_gguf(self, trained, tmp_path):
        processor = sentencepiece.SentencePieceProcessor(str(trained / "tokenizer.model"))
        ids = range(processor.get_piece_size())
        kinds = [gguf.TokenType.CONTROL if processor.is_control(i) else gguf.TokenType.UNKNOWN
                 if processor.is_unknown(i) else gguf.TokenType.BYTE if processor.is_byte(i)
                 else gguf.TokenType.NORMAL for i in ids]  # fmt: skip
        path = gguf_tokenizer_file(
            tmp_path / "sp.gguf",
            "llama",
            [processor.id_to_piece(i) for i in ids],
            kinds,
            scores=[processor.get_score(i) for i in ids],
        )
        tokenizer = load_tokenizer(str(path))
        assert tokenizer.prefix == (1,)
        for text in SENTENCES:
            assert tokenizer.encode(text).tolist() == processor.encode(text), text


def gguf_tokenizer_file(path, model, pieces, kinds, *, scores=None, pre=None, merges=None):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(pieces)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    if scores is not None:
        writer.add_token_scores(scores)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    if merges is not None:
        writer.add_token_merges(merges)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class TestGGUF:
    @pytest.mark.parametrize(("pre", "numbers"), [("gpt-2", 1), ("smollm", 2)])
    def test_pre_tokenizers(self, tmp_path, pre, numbers):
        from tokenizers import pre_tokenizers

        pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "<|im_start|>"]
        kinds = [1] * (len(pieces) - 1) + [3]
        path = gguf_tokenizer_file(tmp_path / "t.gguf", "gpt2", pieces, kinds, pre=pre, merges=["1 2"])
        tokenizer = load_tokenizer(str(path))
        assert len(tokenizer.encode("12")) == numbers
        assert tokenizer.encode("<|im_start|>").tolist() == [len(pieces) - 1]
        assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
        assert tokenizer.prefix == ()

    @pytest.mark.parametrize(
        ("model", "pre", "message"),
        [("gpt2", "mystery", "pre-tokenizer 'mystery'"), ("rwkv", None, "vocabulary kind 'rwkv'")],
    )
    def test_kinds_that_are_not_known(self, tmp_path, model, pre, message):
        path = gguf_tokenizer_file(tmp_path / "t.gguf", model, ["a", "b"], [1, 1], pre=pre, merges=["a b"])
        with pytest.raises(RalmError, match=message):
            load_tokenizer(str(path))

    def test_smollm2(self, smollm2_gguf):
        tokenizer = load_tokenizer(str(smollm2_gguf))
        ids = tokenizer.encode(TEXT)
        assert tokenizer.decode(ids) == TEXT
        assert [tokenizer.decode([i]) for i in tokenizer.encode("in 2024")] == ["in", " ", "2", "0", "2", "4"]


def test_hub_ids_in_offline_mode_open_no_socket(monkeypatch):
    import socket

    monkeypatch.setattr(socket, "socket", lambda *_, **__: pytest.fail("a socket was opened"))
    with pytest.raises(RalmError, match="not in the Hugging Face cache nor reachable"):
        load_tokenizer("nobody/no-such-model")


@pytest.mark.parametrize("name", ["./missing", "/no/such/folder", "missing.gguf", "a/b/c"])
def test_paths_that_are_not_there(name):
    with pytest.raises(UsageError, match="no such folder or file"):
        load_tokenizer(name)


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(UsageError, match="not this file"):
        load_tokenizer(str(tmp_path / "model.bin"))


class TestEncoders:
    """What BERT and RoBERTa put around a text, from each kind of file."""

    def wordpiece(self, folder, **config):
        folder.mkdir(exist_ok=True)
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "so", "##wer", "naive", "we", "##nt", ".", "日", "So"]
        (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return str(folder)

    def test_vocab_txt(self, tmp_path):
        tokenizer = load_tokenizer(self.wordpiece(tmp_path / "bert"))
        assert (tokenizer.prefix, tokenizer.suffix) == ((2,), (3,))
        assert tokenizer.encode("Sower naïve went. 日x [MASK]").tolist() == [5, 6, 7, 8, 9, 10, 11, 1, 4]

    def test_cased(self, tmp_path):
        tokenizer = load_tokenizer(self.wordpiece(tmp_path / "bert", do_lower_case=False))
        assert tokenizer.encode("Sower sower").tolist() == [12, 6, 5, 6]

    def test_vocab_txt_without_its_special_tokens(self, tmp_path):
        folder = self.wordpiece(tmp_path / "bert")
        (tmp_path / "bert" / "vocab.txt").write_text("[UNK]\nso\n")
        with pytest.raises(RalmError, match=r"vocab\.txt: the vocabulary has no \[CLS\] or no \[SEP\]"):
            load_tokenizer(folder)

    def test_roberta(self, tmp_path):
        folder = byte_level_files(tmp_path / "roberta", cls_token="<|endoftext|>", sep_token="</s>")
        tokenizer = load_tokenizer(folder)
        assert [tokenizer.backend.id_to_token(i) for i in (*tokenizer.prefix, *tokenizer.suffix)] == [
            "<|endoftext|>", "</s>"
        ]  # fmt: skip


@pytest.mark.parametrize("bos", [False, True])
def test_saved_and_loaded_again(tmp_path, bos):
    tokenizer = replace(tiny.tokenizer(), prefix=(1,) if bos else (), suffix=(2,) if bos else ())
    tokenizer.save(tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert (again.prefix, again.suffix) == (tokenizer.prefix, tokenizer.suffix)
    assert again.encode(tiny.text(50)).tolist() == tokenizer.encode(tiny.text(50)).tolist()
