"""Generation with retrieval: the windows it sees, the passages it names, and plain generation as its edge."""

import numpy as np
import pytest

from ralm_jax.errors import UsageError
from ralm_jax.generate.local import LocalGenerator
from ralm_jax.generate.ralm import generate_with_retrieval
from ralm_jax.scoring import Scorer
from ralm_jax.settings import GenerateSettings
from ralm_jax.windows import build_windows
from tests import tiny

PASSAGES = [tiny.text(30, seed) for seed in range(5)]
PROMPT = tiny.text(20, 9)


class Fixed:
    """A `PassageSource` that gives what `choose` says, and remembers what it was asked."""

    def __init__(self, tokenizer, choose):
        self.tokenizer, self.choose, self.asked = tokenizer, choose, []

    def find(self, prefixes):
        self.asked.append([len(prefix) for prefix in prefixes])
        rows = np.array([self.choose(len(prefix)) for prefix in prefixes])
        return rows, rows.astype(np.float32)

    def tokens(self, rows):
        return [self.tokenizer.encode(PASSAGES[row]) if row >= 0 else np.zeros(0, np.int32) for row in rows]


@pytest.fixture(scope="module", params=["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def local(request, one_device):
    reader = tiny.on(tiny.reader(tiny.READERS[request.param]), one_device)
    return LocalGenerator(reader, tiny.tokenizer(bos=request.param == "llama"), window=128)


def written(local, choose, prompts=(PROMPT,), *, stride=4, compare=False, **settings):
    source = Fixed(local.tokenizer, choose)
    settings = GenerateSettings(**({"max_new_tokens": 18} | settings))
    return generate_with_retrieval(local, source, list(prompts), settings, stride=stride, compare=compare), source


def in_turns(length):
    return length // 4 % len(PASSAGES)


class TestAttribution:
    def test_covers_every_token(self, local):
        ((generation, segments),), source = written(local, in_turns)
        assert [(s.begin, s.end) for s in segments] == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 18)]
        assert "".join(segment.text for segment in segments) == generation.text
        assert generation.new_tokens == 18
        first = len(local.tokenizer.encode(PROMPT))
        assert source.asked == [[first + done] for done in (0, 4, 8, 12, 16)]
        assert [segment.row for segment in segments] == [in_turns(first + done) for done in (0, 4, 8, 12, 16)]

    @pytest.mark.parametrize("window", [128, 60])
    def test_log_probs_are_those_of_scoring(self, local, window):
        """The same windows as `ralm score` makes, also where the prompt has to lose tokens."""
        local = LocalGenerator(local.reader, local.tokenizer, window=window)
        ((_, segments),), source = written(local, in_turns, compare=True)
        lengths = [len(segment.tokens) for segment in segments]
        tokens = np.array([*local.tokenizer.encode(PROMPT), *(t for s in segments for t in s.tokens)], np.int32)
        assert len(segments) == 5
        first = len(local.tokenizer.encode(PROMPT))
        for candidate in ("log_probs", "plain"):
            ends = np.array([first + segment.end for segment in segments])
            rows = np.array([segment.row if candidate == "log_probs" else -1 for segment in segments])
            windows = build_windows(
                tokens, starts=ends - window, first_labels=ends - lengths, ends=ends,
                passages=source.tokens(rows), num_labels=4, length=window, bos=local.tokenizer.bos,
            )  # fmt: skip
            expected = Scorer(local.reader, window, 4).score(windows)
            found = np.concatenate([getattr(segment, candidate) for segment in segments])
            np.testing.assert_allclose(found, expected[~np.isnan(expected)], atol=1e-4)

    def test_without_comparison_there_is_none(self, local):
        ((_, segments),), _ = written(local, in_turns)
        assert all(segment.plain is None for segment in segments)

    def test_a_stop_string_ends_text_and_segments(self, local):
        ((whole, _),), _ = written(local, in_turns)
        stop = whole.text[len(whole.text) // 2 :][:3]
        ((generation, segments),), _ = written(local, in_turns, stop=(stop,))
        assert generation.finish == "stop"
        assert generation.text == whole.text[: whole.text.index(stop)] == "".join(s.text for s in segments)
        assert segments[-1].end == generation.new_tokens < 18


class TestPassages:
    def test_another_index_gives_another_text(self, local):
        ((first, _),), _ = written(local, in_turns)
        ((second, _),), _ = written(local, lambda length: (in_turns(length) + 2) % len(PASSAGES))
        assert first.text != second.text

    def test_one_passage_is_plain_generation_behind_it(self, local):
        ((generation, _),), _ = written(local, lambda length: 2)
        ((_, plain),) = local.generate([PASSAGES[2] + PROMPT], GenerateSettings(max_new_tokens=18))
        assert local.tokenizer.encode(PASSAGES[2] + PROMPT).tolist() == [
            *local.tokenizer.encode(PASSAGES[2]), *local.tokenizer.encode(PROMPT)
        ]  # fmt: skip
        assert generation.text == plain.text

    def test_no_passage_is_plain_generation(self, local):
        ((generation, segments),), _ = written(local, lambda length: -1, compare=True)
        ((_, plain),) = local.generate([PROMPT], GenerateSettings(max_new_tokens=18))
        assert generation == plain
        for segment in segments:
            np.testing.assert_allclose(segment.log_probs, segment.plain, atol=1e-4)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_stride_does_not_matter_for_a_passage_that_stays(self, local, temperature):
        texts = {written(local, lambda length: 1, stride=n, temperature=temperature)[0][0][0].text for n in (1, 4, 18)}
        assert len(texts) == 1

    def test_a_batch_is_what_its_prompts_are_alone(self, local):
        prompts = [tiny.text(n, n) for n in (5, 30, 12)]
        together, _ = written(local, in_turns, prompts, compare=True)
        for prompt, expected in zip(prompts, together, strict=True):
            ((generation, segments),), _ = written(local, in_turns, [prompt], compare=True)
            assert generation == expected.generation
            assert [s.text for s in segments] == [s.text for s in expected.segments]

    def test_no_room(self, local):
        small = LocalGenerator(local.reader, local.tokenizer, window=30)
        with pytest.raises(UsageError, match="a window of 30 tokens has no room for a text beside a passage of"):
            written(small, in_turns)
