"""From logits to the next token: greedy, or drawn from what temperature, top-k and top-p leave."""

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ralm_jax.settings import GenerateSettings


@dataclass(frozen=True)
class Sampling:
    """What a compiled step depends on; fields as in `GenerateSettings`."""

    temperature: float
    top_k: int | None
    top_p: float
    repetition_penalty: float

    @classmethod
    def of(cls, settings: GenerateSettings) -> Self:
        return cls(settings.temperature, settings.top_k, settings.top_p, settings.repetition_penalty)

    @property
    def penalised(self) -> bool:
        """Whether it matters which tokens were there before."""
        return self.repetition_penalty != 1


def choose(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"] | None, keys: Array, sampling: Sampling
) -> Int[Array, " B"]:
    """The next token of each row.

    Args:
        logits: float32.
        seen: tokens that were there before; only read where repetition is penalised.
        keys: (B,) random keys, one a row, so that no row depends on its neighbours.
    """
    if sampling.penalised and seen is not None:
        penalty = sampling.repetition_penalty
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.vmap(jax.random.categorical)(keys, kept(logits / sampling.temperature, sampling))
    return drawn.astype(jnp.int32)


def kept(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """`logits`; those that top-k (Fan et al., 2018) or top-p (Holtzman et al., 2020) leaves out, at the minimum."""
    lowest = jnp.finfo(jnp.float32).min
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits >= least, logits, lowest)
    if sampling.top_p < 1:
        ranked = -jnp.sort(-logits, axis=-1)
        probabilities = jax.nn.softmax(ranked, axis=-1)
        above = jnp.cumsum(probabilities, axis=-1) - probabilities  # of the likelier tokens; 0 for the likeliest
        least = jnp.where(above < sampling.top_p, ranked, jnp.inf).min(axis=-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, lowest)
    return logits
