"""One file a model family: its configuration, its module, its checkpoint keys."""

from ralm_jax.keys import Family
from ralm_jax.models import gpt2, llama

FAMILIES: dict[str, Family] = {family.config.model_type: family for family in (gpt2.FAMILY, llama.FAMILY)}
