"""The predictive reranker's losses (In-Context RALM, section 6.2, equations 7 to 9), in float32 log space.

The scores f and log-probabilities of a stride's passages are (B, k); strides with fewer than k passages are masked. The
reader's log-probability of a target may be -5 or -2,000: no exponential of it is ever formed.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ralm_jax.settings import RerankerLoss

Loss = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
LOWEST = jnp.finfo(jnp.float32).min


def log_softmax(values: Float[Array, "B k"], there: Bool[Array, "B k"]) -> Float[Array, "B k"]:
    """Over the passages that are there; the others get what no exponential notices, and no gradient."""
    masked = jnp.where(there, values.astype(jnp.float32), LOWEST)
    return jax.nn.log_softmax(masked, axis=1)


def marginal_loss(
    scores: Float[Array, "B k"], log_probs: Float[Array, "B k"], there: Bool[Array, "B k"]
) -> Float[Array, "B"]:
    """Equation 9 less its lowest value: -log sum_i p_rank(d_i) p(y | d_i), less that of the best passage alone.

    What is taken off does not depend on f. It leaves the nats that the ranking costs beside the oracle's, which float32
    holds to 1e-6 where the whole is 2,000.
    """
    log_probs = jnp.where(there, log_probs, LOWEST)
    behind = log_probs - log_probs.max(axis=1, keepdims=True)
    return -jax.nn.logsumexp(log_softmax(scores, there) + jnp.where(there, behind, LOWEST / 4), axis=1)


def posterior_loss(
    scores: Float[Array, "B k"],
    log_probs: Float[Array, "B k"],
    there: Bool[Array, "B k"],
    temperature: float = 1.0,
) -> Float[Array, "B"]:
    """KL(q || p_rank) where q_i is proportional to p(y | d_i)^(1 / temperature): every passage's share is a target."""
    log_q = log_softmax(log_probs / temperature, there)
    terms = jnp.exp(log_q) * (log_q - log_softmax(scores, there))
    return jnp.where(there, terms, 0).sum(axis=1)


def make_loss(loss: RerankerLoss, temperature: float) -> Loss:
    """(scores, log_probs, there) -> (B,) of that name."""
    return marginal_loss if loss == "marginal" else functools.partial(posterior_loss, temperature=temperature)
