"""Decoding: neighbours, padding, batches and devices change nothing; few compilations; what cannot be is refused."""

import itertools

import jax
import numpy as np
import pytest

from ralm_jax.errors import RalmError, UsageError
from ralm_jax.generate.decoding import advance, begin, bucket, decode, join, keys_of, make_room, padded_left
from ralm_jax.generate.sampling import Sampling
from ralm_jax.settings import GenerateSettings
from ralm_jax.sharding import make_mesh, on_mesh, shard_batch
from tests import tiny

GREEDY = Sampling.of(GenerateSettings())
DRAWN = Sampling.of(GenerateSettings(temperature=1.0, top_p=0.9, repetition_penalty=1.2))


def prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 128, length).astype(np.int32) for length in lengths]


def run(reader, some, count=10, sampling=GREEDY, keys=None, **options):
    steps = list(decode(reader, some, count, sampling, keys=keys_of(0, len(some)) if keys is None else keys, **options))
    return np.stack([step.tokens for step in steps], 1), np.stack([step.log_probs for step in steps], 1)


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt-neo", marks=pytest.mark.slow)])
def reader(request, one_device):
    return tiny.on(tiny.reader(tiny.READERS[request.param]), one_device)


class TestNothingElseMatters:
    @pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
    def test_neighbours(self, reader, sampling):
        some, keys = prompts(3, 40, 17, 1), keys_of(0, 4)
        together, log_probs = run(reader, some, sampling=sampling)
        for i, prompt in enumerate(some):
            alone, given = run(reader, [prompt], sampling=sampling, keys=keys[i : i + 1], batch=3)
            np.testing.assert_array_equal(alone[0], together[i])
            np.testing.assert_allclose(given[0], log_probs[i], atol=1e-5)

    def test_going_on_is_starting_with_more(self, reader):
        (prompt,) = prompts(20)
        whole, log_probs = run(reader, [prompt], 12, DRAWN)
        rest, given = run(reader, [np.concatenate([prompt, whole[0, :5]])], 7, DRAWN, drawn=5)
        np.testing.assert_array_equal(rest[0], whole[0, 5:])
        np.testing.assert_allclose(given[0], log_probs[0, 5:], atol=1e-5)

    def test_seeds_do(self, reader):
        some = prompts(20)
        first, second = (run(reader, some, 12, DRAWN, keys=keys_of(seed, 1))[0] for seed in (0, 1))
        assert (first != second).any()

    @pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2)])
    def test_devices(self, reader, shape):
        some, keys = prompts(3, 40, 17), keys_of(0, 3)
        expected, log_probs = run(reader, some, keys=keys)
        spread = tiny.on(reader, make_mesh(*shape))
        found, given = run(spread, some, keys=keys)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_allclose(given, log_probs, atol=1e-5)


def test_what_is_remembered_is_spread(reader):
    mesh = make_mesh(2, 2, 2)
    spread = tiny.on(reader, mesh)
    tokens, valid = padded_left(prompts(3, 40, 17, 9), 48)
    with on_mesh(mesh):
        arrays = (shard_batch(mesh, x) for x in (tokens, valid, keys_of(0, 4)))
        run, _ = begin(spread.graphdef, spread.state, *arrays, jax.numpy.int32(0), GREEDY)
        run = run._replace(parts=[make_room(part, 32) for part in run.parts])
        run, _ = advance(spread.graphdef, spread.state, run, GREEDY)
    for array in (run.parts[0].keys, run.parts[0].values):
        assert array.sharding.spec[1:3] == (("data", "fsdp"), "tensor")


def test_compilations_are_few(reader):
    """However long prompts and texts of a bucket are, and with whomever they go."""
    steps = (begin, make_room, join, advance)
    for step in steps:
        step.clear_cache()
    for length, count in itertools.product((1, 9, 30, 32), (2, 7, 20)):
        run(reader, prompts(length, 5, 33), count)
    assert [step._cache_size() for step in steps] == [2, 2, 1, 1]


def test_a_prompt_may_fill_all_positions(reader):
    some = prompts(250, 3)
    found, _ = run(reader, some, 7)
    np.testing.assert_array_equal(run(reader, some[1:], 7)[0][0], found[1])


class TestRefused:
    def test_more_than_the_positions(self, reader):
        with pytest.raises(UsageError, match="a prompt of 250 tokens and 8 new ones are more than the 256 positions"):
            run(reader, prompts(250), 8)

    def test_an_empty_prompt(self, reader):
        with pytest.raises(UsageError, match="a prompt is empty"):
            run(reader, prompts(3, 0))

    def test_an_unknown_token(self, reader):
        with pytest.raises(RalmError, match=r"a prompt has token 128, the reader .* knows 128"):
            run(reader, [np.array([1, 128], np.int32)])

    def test_nan(self, reader):
        broken = jax.tree.map(lambda leaf: leaf * np.float32("nan"), reader.state)
        with pytest.raises(RalmError, match="the reader gives NaN in float32"):
            run(type(reader)(**(vars(reader) | {"state": broken})), prompts(3))


def test_buckets():
    assert [bucket(n) for n in (1, 32, 33, 48, 49, 64, 65, 96, 97, 129, 513, 1000, 1024)] == [
        32, 32, 40, 48, 56, 64, 80, 96, 112, 160, 640, 1024, 1024
    ]  # fmt: skip
    assert bucket(1000, 1010) == 1010
