"""One file a model family: its configuration, its module, its checkpoint keys. Here they are by `model_type`."""

from ralm_jax.config import ModelConfig
from ralm_jax.keys import Family
from ralm_jax.models import encoder, gpt2, gpt_neo, gptj, llama, opt

READERS = {
    family.config.model_type: family for family in (gpt2.FAMILY, gpt_neo.FAMILY, gptj.FAMILY, opt.FAMILY, llama.FAMILY)
}
ENCODERS = {"bert": encoder.BERT, "dpr": encoder.BERT, "roberta": encoder.ROBERTA}
FAMILIES: dict[str, Family] = READERS | ENCODERS

SIZES: dict[str, ModelConfig] = {name: config for family in FAMILIES.values() for name, config in family.sizes.items()}
