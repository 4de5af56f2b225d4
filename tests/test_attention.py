"""Every implementation of `attend` against attention written out in NumPy."""

import re
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ralm_jax import attention
from ralm_jax.attention import Past, attend, check_device
from ralm_jax.errors import UsageError
from ralm_jax.reader import load_reader
from ralm_jax.sharding import make_mesh, on_mesh

HERE = jax.default_backend()


@dataclass(frozen=True)
class Case:
    """Shapes and masks of one comparison."""

    length: int = 140
    heads: int = 4
    kv_heads: int = 2
    causal: bool = True
    padded: bool = True
    documents: bool = False
    window: int | None = None
    past: int = 0
    dtype: str = "float32"

    def inputs(self):
        """q, k, v, and what `attend` takes by name."""
        rng = np.random.default_rng(self.length)
        real = padding(self.length, rng) if self.padded else np.ones((2, self.length), bool)
        real = packed(self.length, rng) if self.documents else real
        batch = len(real)
        shapes = [(batch, self.length, n, 8) for n in (self.heads, self.kv_heads, self.kv_heads)]
        arrays = [jnp.asarray(rng.normal(size=shape), self.dtype) for shape in shapes]
        named = {"scale": 0.3, "causal": self.causal}
        if self.padded:
            named["valid"] = jnp.asarray(real)
        if self.window is not None:
            named["window"] = jnp.array(self.window)
        if self.past:
            keys, values = rng.normal(size=(2, batch, self.past, self.kv_heads, 8))
            named["past"] = Past(
                jnp.asarray(keys.transpose(0, 2, 3, 1), self.dtype),
                jnp.asarray(values.transpose(0, 2, 1, 3), self.dtype),
                jnp.asarray(rng.random((batch, self.past)) > 0.3),
            )
        return arrays, named


def padding(length, rng):
    """Real tokens of a sequence without padding, padded on the left, on the right, inside, and of nothing else."""
    real = np.ones((5, length), bool)
    real[1, : length // 3] = False
    real[2, length - length // 3 :] = False
    real[3] = rng.random(length) > 0.3
    real[3, 0] = True
    real[4] = False
    return real


def packed(length, rng):
    """The document of each token: of three sequences with several, of which the last has padding; of one with one, and
    of nothing but padding."""
    numbers = 1 + np.sort(rng.integers(0, 4, (5, length)), axis=1)
    numbers[2, length - length // 3 :] = 0
    numbers[3:] = [[1], [0]]
    return numbers.astype(np.int32)


def reference(q, k, v, cotangent, *, scale, causal, valid=None, window=None, past=None):
    """The output, and the gradients of its product with `cotangent`, in float64 NumPy."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    batch, length, heads, _ = q.shape
    kv_heads = k.shape[2]
    real = np.ones((batch, length), bool) if valid is None else np.asarray(valid)
    places = np.tile(np.arange(length), (batch, 1))
    if past is not None:
        before = np.asarray(past.valid)
        k = np.concatenate([np.asarray(past.keys, np.float64).transpose(0, 3, 1, 2), k], axis=1)
        v = np.concatenate([np.asarray(past.values, np.float64).transpose(0, 2, 1, 3), v], axis=1)
        places = np.concatenate([before.cumsum(axis=1) - before.sum(axis=1, keepdims=True) - 1, places], axis=1)
        real = np.concatenate([before, real], axis=1)
    k, v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    distance = np.arange(length)[None, :, None] - places[:, None]
    seen = real[:, None] if real.dtype == bool else real[:, :, None] == real[:, None]
    mask = seen & (distance >= 0 if causal else True) & (distance < (np.inf if window is None else window))

    scores = np.where(mask[:, None], scale * np.einsum("btnh,bsnh->bnts", q, k), -np.inf)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True, initial=-1e9))
    weights /= np.maximum(weights.sum(axis=3, keepdims=True), 1e-9)  # rows without a key
    slopes = np.einsum("btnh,bsnh->bnts", cotangent, v)
    slopes = scale * weights * (slopes - (weights * slopes).sum(axis=3, keepdims=True))
    dk, dv = np.einsum("bnts,btnh->bsnh", slopes, q), np.einsum("bnts,btnh->bsnh", weights, cotangent)
    dk, dv = (x[:, -length:].reshape(batch, length, kv_heads, -1, x.shape[3]).sum(axis=3) for x in (dk, dv))
    return np.einsum("bnts,bsnh->btnh", weights, v), (np.einsum("bnts,bsnh->btnh", slopes, k), dk, dv)


CASES = {
    "one token": Case(1, kv_heads=4, padded=False),
    "blocks and a part": Case(300, kv_heads=1, padded=False),
    "both ways, a part": Case(causal=False, padded=False),
    "padding": Case(heads=6),
    "both ways, padding": Case(128, causal=False),
    "documents": Case(300, heads=6, documents=True),
    "both ways, documents": Case(documents=True, causal=False),
    "documents, window": Case(documents=True, window=20),
    "window": Case(window=20),
    "both ways, window": Case(causal=False, window=20, padded=False),
    "past": Case(past=37, padded=False),
    "past, window": Case(past=37, window=60),
    "bfloat16": Case(dtype="bfloat16"),
}

KERNELS_REFUSE = {"window": "does not limit how far back", "past": "does not read the keys and values"}


@pytest.fixture(params=["xla", "xla, long", "splash", "cudnn", "cudnn's steps"])
def impl(request, monkeypatch):
    """An implementation; the loops of long inputs on small ones; cuDNN's steps around XLA in the kernel's place."""
    name, *_ = request.param.replace("'", ",").split(",")
    if request.param == "xla, long":
        monkeypatch.setattr("ralm_jax.attention.xla.MAX_BLOCKS", 0)
        monkeypatch.setattr("ralm_jax.attention.xla.LONG_BLOCK", 64)
    elif request.param == "splash":
        monkeypatch.setattr("ralm_jax.attention.kernels.INTERPRET", True)
        monkeypatch.setattr("ralm_jax.attention.kernels.BLOCK", 128)
    elif request.param == "cudnn's steps":
        monkeypatch.setattr("ralm_jax.attention.device_refusal", lambda *_: None)
        monkeypatch.setattr(jax.nn, "dot_product_attention", partial(in_its_place, jax.nn.dot_product_attention))
    elif request.param == "cudnn" and HERE != "gpu":
        pytest.skip("cuDNN's kernel needs a GPU")
    return name


def in_its_place(plain, *arrays, implementation, **named):
    assert implementation == "cudnn"
    wide = [x.astype(jnp.float32) for x in arrays]  # it mixes dtypes, which is an error in these tests
    return plain(*wide, **named).astype(arrays[0].dtype)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_against_numpy(impl, name):
    case = CASES[name]
    if impl == "cudnn" and HERE == "gpu" and case.dtype == "float32":
        pytest.skip("cuDNN's kernel has no float32")
    arrays, named = case.inputs()

    @jax.jit
    def run(arrays, cotangent):
        output, back = jax.vjp(lambda *arrays: attend(*arrays, impl=impl, **named), *arrays)
        return output, back(cotangent.astype(output.dtype))

    cotangent = np.random.default_rng(0).normal(size=arrays[0].shape).astype(np.float32)
    read = np.asarray(named["valid"]) > 0 if case.padded else np.ones(cotangent.shape[:2], bool)
    cotangent[~read] = 0  # as nobody reads these rows
    refusals = [text for option, text in KERNELS_REFUSE.items() if option in named and impl != "xla"]
    if case.documents and impl == "cudnn":
        refusals = ["does not keep the documents of a window apart"]
    if refusals:
        with pytest.raises(UsageError, match=rf"^attention {impl} {refusals[0]}.*; use auto or xla"):
            run(arrays, cotangent)
        return
    output, gradients = run(arrays, cotangent)
    expected, slopes = reference(*arrays, cotangent, **named)
    tolerance = 1e-5 if case.dtype == "float32" else 2e-2
    assert output.dtype == case.dtype
    assert np.isfinite(output.astype(jnp.float32)).all()
    np.testing.assert_allclose(np.asarray(output, np.float64)[read], expected[read], atol=tolerance)
    for gradient, slope in zip(gradients, slopes, strict=True):
        np.testing.assert_allclose(
            np.asarray(gradient, np.float64), slope, atol=tolerance * max(1, np.abs(slope).max())
        )


def test_long_inputs_take_memory_in_proportion(monkeypatch):
    def temporary(length):
        x = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        step = jax.jit(jax.grad(lambda x: attend(x, x, x, scale=1.0, impl="xla").sum()))
        return step.lower(x).compile().memory_analysis().temp_size_in_bytes

    monkeypatch.setattr("ralm_jax.attention.xla.LONG_BLOCK", 256)
    assert temporary(16384) < 2.1 * temporary(8192)


def test_an_input_is_long_where_its_blocks_would_be_too_many(monkeypatch):
    monkeypatch.setattr("ralm_jax.attention.xla.BLOCK", 4)

    def products(length):
        x = jnp.ones((1, length, 2, 4))
        return str(jax.make_jaxpr(lambda x: attend(x, x, x, scale=0.5))(x)).count("dot_general[")

    assert products(128) == 2 * 32
    assert products(129) == 2  # in a loop


def test_splash_on_a_mesh_equals_one_device(monkeypatch):
    monkeypatch.setattr("ralm_jax.attention.kernels.INTERPRET", True)
    (q, k, v), named = Case(heads=8).inputs()
    q, k, v, named["valid"] = (x[:4] for x in (q, k, v, named["valid"]))
    step = jax.value_and_grad(lambda arrays: (attend(*arrays, impl="splash", **named) ** 2).sum())
    alone, slopes = jax.jit(step)((q, k, v))
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    place = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor"))
    with on_mesh(mesh):
        spread, spread_slopes = jax.jit(step)(jax.device_put((q, k, v), place))
    np.testing.assert_allclose(alone, spread, rtol=1e-5)
    for one, other in zip(slopes, spread_slopes, strict=True):
        assert other.sharding.is_equivalent_to(place, 4)
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_rows_without_keys_are_finite():
    q = jnp.ones((1, 5, 2, 4))
    valid = jnp.zeros((1, 5), bool)
    assert np.isfinite(attend(q, q, q, scale=1.0, valid=valid)).all()
    gradient = jax.jit(jax.grad(lambda x: attend(x, x, x, scale=1.0, valid=valid).sum()))(q)
    assert np.isfinite(gradient).all()


def test_large_scores_do_not_overflow():
    q = jnp.full((1, 6, 1, 4), 1e4, jnp.float32)
    assert np.isfinite(attend(q, q, q, scale=1.0)).all()


def test_an_unknown_implementation_fails_loudly():
    q = jnp.ones((1, 5, 2, 4))
    with pytest.raises(ValueError, match="'flash' is not one of auto, xla, cudnn, splash"):
        attend(q, q, q, scale=1.0, impl="flash")


@pytest.mark.parametrize(
    ("impl", "platform", "dtype", "head_dim", "message"),
    [
        ("splash", "gpu", "bfloat16", 64, "attention splash needs a TPU, not a GPU; use auto or xla"),
        ("cudnn", "cpu", "bfloat16", 64, "attention cudnn needs a GPU, not a CPU; use auto or xla"),
        ("cudnn", "gpu", "float32", 64, "attention cudnn needs bfloat16 or float16, not float32; use auto or xla"),
        ("cudnn", "gpu", "float16", 256, "attention cudnn needs heads of 8, 16, … 128 dimensions, not 256; use auto"),
        ("cudnn", "gpu", "float16", 60, "attention cudnn needs heads of 8, 16, … 128 dimensions, not 60; use auto"),
    ],
)
def test_a_kernel_that_cannot_run_there_says_why(impl, platform, dtype, head_dim, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        check_device(impl, platform, jnp.dtype(dtype), head_dim)
    check_device("auto", platform, jnp.dtype(dtype), head_dim)


@pytest.mark.parametrize(
    ("platform", "dtype", "named", "chosen"),
    [
        ("tpu", "float32", {}, "splash"),
        ("gpu", "bfloat16", {}, "cudnn"),
        ("gpu", "float32", {}, "xla"),
        ("cpu", "bfloat16", {}, "xla"),
        ("tpu", "bfloat16", {"window": jnp.array(3)}, "xla"),
        ("tpu", "bfloat16", {"valid": jnp.ones((1, 5), jnp.int32)}, "splash"),
        ("gpu", "bfloat16", {"valid": jnp.ones((1, 5), jnp.int32)}, "xla"),
        ("gpu", "bfloat16", {"valid": jnp.ones((1, 5), bool)}, "cudnn"),
    ],
)
def test_auto_takes_what_the_devices_have(monkeypatch, platform, dtype, named, chosen):
    q = jnp.ones((1, 5, 2, 8), dtype)
    called = []
    monkeypatch.setattr("ralm_jax.attention.current_platform", lambda: platform)
    monkeypatch.setattr("ralm_jax.attention.attend_xla", lambda *_, **__: called.append("xla") or q)
    for name in ("splash", "cudnn"):
        monkeypatch.setitem(attention.KERNELS, name, lambda *_, name=name, **__: called.append(name) or q)
    attend(q, q, q, scale=1.0, **named)
    assert called == [chosen]


def test_a_reader_carries_how_it_attends(monkeypatch, tiny_model, one_device):
    with pytest.raises(UsageError, match=r"^attention cudnn needs a GPU, not a CPU; use auto or xla$"):
        load_reader(str(tiny_model), attention="cudnn")
    monkeypatch.setattr("ralm_jax.attention.kernels.INTERPRET", True)
    xla, splash = (load_reader(str(tiny_model), mesh=one_device, attention=name) for name in ("xla", "splash"))
    assert splash.identity == xla.identity
    tokens, valid = np.arange(40).reshape(2, 20), np.arange(20) > [[0], [5]]
    found, expected = splash.logits(tokens, valid), xla.logits(tokens, valid)
    assert np.abs(found - expected)[valid].max() > 0  # computed in another way
    np.testing.assert_allclose(found[valid], expected[valid], atol=1e-5)
