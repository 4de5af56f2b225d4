"""Attention by kernels that others wrote: splash for TPUs (Pallas), flash attention of cuDNN for GPUs.

Both take padding on either side, or inside, and splash the documents of a window. Neither forms a T x T array, in the
backward pass either.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from ralm_jax.attention.xla import Valid
from ralm_jax.sharding import RULES

LANES = 128  # the kernel's blocks are multiples of it
BLOCK = 512
INTERPRET = False  # splash without a TPU, slowly: for tests


def splash(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    valid: Valid | None,
    causal: bool,
) -> Float[Array, "B T N H"]:
    """Each device of the current mesh runs the kernel on its part of the batch and of the heads."""
    batch, length, *_ = q.shape
    count = math.ceil(length / BLOCK)
    block = LANES * math.ceil(length / (count * LANES))
    padding = count * block - length
    if valid is None and not causal and padding:
        valid = jnp.ones((batch, length), bool)  # of causal ones no token sees what is behind it
    # a token sees those of its own segment: real tokens or a document, or padding
    segments = None if valid is None else jnp.pad(valid.astype(jnp.int32), ((0, 0), (0, padding)))
    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0))) for x in (q * scale, k, v))

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        return run_splash(q, k, v, segments, block, causal)

    run = local
    if not jax.sharding.get_abstract_mesh().empty:
        heads = PartitionSpec(RULES["batch"], None, RULES["heads"], None)
        parts = (heads, heads, heads, PartitionSpec(RULES["batch"], None))
        run = jax.shard_map(local, in_specs=parts, out_specs=heads, check_vma=False)
    return run(q, k, v, segments)[:, :length]


def run_splash(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    segments: Int[Array, "B S"] | None,
    block: int,
    causal: bool,
) -> Float[Array, "B S N H"]:
    """The kernel on one device; S is a multiple of `block`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    length, heads = q.shape[1:3]
    mask = (masks.CausalMask if causal else masks.FullMask)((length, length))
    attention = kernel.make_splash_mha(
        masks.MultiHeadMask([mask] * heads),
        block_sizes=kernel.BlockSizes(
            block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=INTERPRET,
    )

    def one(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        return attention(q, k, v, None if segments is None else kernel.SegmentIds(segments, segments))

    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))  # B N S H
    return jax.vmap(one)(q, k, v, segments).swapaxes(1, 2)


def cudnn(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    valid: Bool[Array, "B T"] | None,
    causal: bool,
) -> Float[Array, "B T N H"]:
    """The kernel knows lengths, but no other padding without a T x T array: real tokens move to the front, in order,
    and back afterwards."""
    if valid is None:
        return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=causal, implementation="cudnn")
    order = jnp.argsort(~valid, axis=1, stable=True)
    lengths = jnp.maximum(valid.sum(axis=1, dtype=jnp.int32), 1)  # a softmax over nothing would be NaN

    def move(x: jax.Array, places: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, places[:, :, None, None], axis=1)

    out = jax.nn.dot_product_attention(
        *(move(x, order) for x in (q, k, v)),
        scale=scale,
        is_causal=causal,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return jnp.where(valid[:, :, None, None], move(out, jnp.argsort(order, axis=1)), 0)
