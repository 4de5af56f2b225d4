"""One file a model family: its configuration, its module, its checkpoint keys. Here they are by `model_type`."""

from ralm_jax.config import ConfigFile, ModelConfig
from ralm_jax.keys import Family
from ralm_jax.models import cross_encoder, encoder, gpt2, gpt_neo, gptj, llama, opt

READERS = {
    family.config.model_type: family for family in (gpt2.FAMILY, gpt_neo.FAMILY, gptj.FAMILY, opt.FAMILY, llama.FAMILY)
}
ENCODERS = {"bert": encoder.BERT, "dpr": encoder.BERT, "roberta": encoder.ROBERTA}
CROSS_ENCODERS = {"bert": cross_encoder.BERT_PAIR, "roberta": cross_encoder.ROBERTA_PAIR}
FAMILIES: dict[str, Family] = READERS | ENCODERS

SIZES: dict[str, ModelConfig] = {name: config for family in FAMILIES.values() for name, config in family.sizes.items()}


def families_for(file: ConfigFile) -> dict[str, Family]:
    """`FAMILIES`; for a cross-encoder's config.json with the families that have its head."""
    return FAMILIES | CROSS_ENCODERS if cross_encoder.states_pair_head(file) else FAMILIES
