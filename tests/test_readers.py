"""Properties of every reader: causality, padding, batches, depth, meshes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ralm_jax.errors import UsageError
from ralm_jax.model import abstract
from ralm_jax.models import FAMILIES as FAMILIES_BY_TYPE
from ralm_jax.models import SIZES
from ralm_jax.rope import rotate_half
from ralm_jax.sharding import make_mesh, on_mesh
from ralm_jax.stack import scan_layers
from ralm_jax.weights import flat_state
from tests import tiny

FAMILIES = pytest.mark.parametrize("name", tiny.READERS)
KINDS = ("gpt2", "llama", "gpt-neo")  # of layers; the other families' are as one of these
SOME_FAMILIES = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in tiny.READERS]
)


def tokens(shape, seed=0, vocab=128):
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


@FAMILIES
def test_causality(name):
    reader = tiny.reader(tiny.READERS[name])
    ids = tokens((1, 150))
    changed = ids.copy()
    changed[0, 131:] = (changed[0, 131:] + 1) % 128
    before, after = reader.logits(ids), reader.logits(changed)
    np.testing.assert_array_equal(before[:, :131], after[:, :131])
    assert np.abs(np.asarray(before - after)[:, 131:]).max() > 1e-3


@FAMILIES
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    reader = tiny.reader(tiny.READERS[name])
    ids = tokens((2, 40))
    padded = np.full((2, 57), 5, np.int32)
    place = slice(17, 57) if side == "left" else slice(0, 40)
    padded[:, place] = ids
    valid = np.zeros((2, 57), bool)
    valid[:, place] = True
    logits = np.asarray(reader.logits(padded, valid))
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(logits[:, place], reader.logits(ids), atol=1e-5)


@FAMILIES
def test_batch_size_changes_nothing(name):
    reader = tiny.reader(tiny.READERS[name])
    ids = tokens((5, 33))
    together = np.asarray(reader.logits(ids))
    for row in range(5):
        np.testing.assert_allclose(together[row], reader.logits(ids[row : row + 1])[0], atol=1e-5)


@SOME_FAMILIES
def test_scan_is_the_loop_and_remat_changes_nothing(name):
    config = tiny.READERS[name]
    reader = tiny.reader(config)
    model = nnx.merge(reader.graphdef, reader.state)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 20, config.hidden_size)), jnp.float32)
    graphdef, state = nnx.split(model.layers)
    phases = jnp.ones((2, 20, 1, config.head_dim // 2)) * 0.6
    args = (None, partial(rotate_half, phases=(phases, phases)))
    windows = jnp.arange(3, 3 + config.num_layers, dtype=jnp.int32)
    with on_mesh(reader.mesh):
        y = x
        for layer in range(config.num_layers):
            y = nnx.merge(graphdef, jax.tree.map(lambda p, i=layer: p[i], state))(y, *args, windows[layer])
        np.testing.assert_allclose(scan_layers(model.layers, x, *args, each=(windows,)), y, atol=1e-5)

        def loss(remat, state):
            return scan_layers(nnx.merge(graphdef, state), x, *args, each=(windows,), remat=remat).sum()

        plain, again = (jax.jit(jax.grad(partial(loss, remat)))(state) for remat in (False, True))
        for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_every_parameter_has_a_logical_axis_for_every_dimension():
    for config in tiny.READERS.values():
        reader = tiny.reader(config)
        for path, leaf in flat_state(reader.state).items():
            axes = leaf.get_metadata("out_sharding")
            assert len(axes) == leaf.get_value().ndim, path
            assert axes[0] == ("layers" if path.startswith("layers.") else axes[0])


# Parameters of the published checkpoints, as transformers counts them (encoders without their poolers).
PARAMETERS = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "gpt-neo-1.3b": 1_315_575_808, "gpt-neo-2.7b": 2_651_307_520, "gpt-j-6b": 6_050_882_784,
    "opt-125m": 125_239_296, "opt-350m": 331_196_416, "opt-1.3b": 1_315_758_080, "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984, "opt-13b": 12_853_473_280, "opt-30b": 29_974_540_288, "opt-66b": 65_719_701_504,
    "llama-7b": 6_738_415_616, "llama-13b": 13_015_864_320, "llama-33b": 32_528_943_616, "llama-65b": 65_285_660_672,
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "gpt-43b": 42_900_135_936, "bert-base": 108_891_648, "roberta-base": 124_055_040,
}  # fmt: skip


def test_every_size_of_the_papers_has_its_parameters():
    """Shapes alone: nothing is allocated."""
    found = {}
    for name, config in SIZES.items():
        _, state = abstract(FAMILIES_BY_TYPE[config.model_type], config, make_mesh(), "bfloat16")
        found[name] = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert found == PARAMETERS


def test_meshes_use_the_devices_they_are_asked_for():
    assert make_mesh(fsdp=2, tensor=2).devices.shape == (2, 2, 2)
    assert make_mesh(data=1).devices.size == 1
    for sizes in ({"fsdp": 3}, {"data": 4, "tensor": 4}, {"fsdp": 0}):
        with pytest.raises(UsageError, match="the 8 devices here"):
            make_mesh(**sizes)


def test_bfloat16_is_close():
    reader = tiny.reader(tiny.LLAMA)
    half = replace(reader, state=jax.tree.map(lambda x: x.astype(jnp.bfloat16), reader.state), dtype="bfloat16")
    ids = tokens((2, 30))
    logits = half.logits(ids)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, reader.logits(ids), atol=0.05)
