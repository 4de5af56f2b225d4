"""AdamW with warm-up and decay, as the paper leaves it open (In-Context RALM, section 6.2: only steps, batch and peak
learning rate are stated there)."""

from typing import Any

import jax
import optax

from ralm_jax.errors import UsageError
from ralm_jax.settings import TrainSettings

DECAYED = {"kernel": True, "table": True, "bias": False, "scale": False}  # parameters by their own names


def learning_rate(settings: TrainSettings) -> optax.Schedule:
    """Step -> learning rate: from 0 up to the peak, then down."""
    peak, warmup = settings.learning_rate, round(settings.warmup * settings.steps)
    left = max(1, settings.steps - warmup)
    after: dict[str, optax.Schedule] = {
        "linear": optax.linear_schedule(peak, 0, left),
        "cosine": optax.cosine_decay_schedule(peak, left),
        "constant": optax.constant_schedule(peak),
    }
    # the first update is not lost to a learning rate of 0, and the peak is reached
    rising = optax.linear_schedule(peak / max(1, warmup), peak, max(1, warmup - 1))
    return optax.join_schedules([rising, after[settings.decay]], [warmup])


def is_decayed(params: Any) -> Any:
    """For every parameter, whether weights decay: matrices and embeddings do, biases and norms do not.

    Its own name decides, not its rank: stacked layers have biases of two axes and more.

    Raises:
        UsageError: a parameter whose name is not known here.
    """

    def decided(path: tuple[Any, ...], _: Any) -> bool:
        names = [str(getattr(part, "key", getattr(part, "name", part))) for part in path]
        known = [name for name in names if name in DECAYED]
        if not known:
            raise UsageError(f"no rule says whether {'.'.join(names)} decays: add it to train.optim.DECAYED")
        return DECAYED[known[-1]]

    return jax.tree_util.tree_map_with_path(decided, params)


def make_optimizer(settings: TrainSettings) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW."""
    clip = optax.clip_by_global_norm(settings.clip) if settings.clip else optax.identity()
    made = optax.chain(
        clip,
        optax.adamw(
            learning_rate(settings),
            b1=settings.beta1,
            b2=settings.beta2,
            eps=1e-8,
            weight_decay=settings.weight_decay,
            mask=is_decayed,
        ),
    )

    def update(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # Optax counts steps in integers
            return made.update(*args)

    return optax.GradientTransformation(made.init, update)
