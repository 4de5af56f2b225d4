"""One file a model family: its configuration, its module, its checkpoint keys."""

from ralm_jax.models import gpt2, llama
from ralm_jax.weights import Family

FAMILIES: dict[str, Family] = {family.config.model_type: family for family in (gpt2.FAMILY, llama.FAMILY)}
