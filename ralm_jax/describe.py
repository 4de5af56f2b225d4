"""What a model is, without loading it: `ralm inspect`."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from ralm_jax import checkpoint, weights
from ralm_jax.config import ModelConfig
from ralm_jax.encoder import UNLIMITED, stated_recipe, transformer_folder
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.hub import locate
from ralm_jax.keys import Family
from ralm_jax.model import abstract, config_file, family_of
from ralm_jax.models import CROSS_ENCODERS, ENCODERS, FAMILIES, READERS, SIZES, families_for
from ralm_jax.models.encoder import BertConfig
from ralm_jax.sharding import make_mesh
from ralm_jax.sources import FORMATS, open_source
from ralm_jax.tokenizer import load_tokenizer


def describe(model: str) -> dict[str, Any]:
    """Facts by name: of the configuration, and unless `model` is a name in `SIZES`, of its weights and tokenizer.

    Raises:
        UsageError: no such model.
        RalmError: a configuration that is not supported.
    """
    if model in SIZES and not Path(model).exists():
        config = SIZES[model]
        return config_facts(FAMILIES[config.model_type], config)
    root = locate(model, weights=False)
    path = transformer_folder(root)
    file = config_file(path)
    family, config = family_of(file, families_for(file))
    local = Path(model).expanduser().exists() or checkpoint.there(path) or any(fmt.there(path) for fmt in FORMATS)
    facts = config_facts(family, config)
    facts |= weight_facts(family, config, path) if local else {"weights": "on the hub, not fetched"}
    if isinstance(config, BertConfig):
        facts |= recipe_facts(root)
    return facts | tokenizer_facts(model, config)


def support_table() -> str:
    """The README's table of what is supported, from the registry."""
    rows = ["| | model | variants | named sizes |", "|---|---|---|---|"]
    for role, families in (("reader", READERS), ("encoder", ENCODERS), ("reranker", CROSS_ENCODERS)):
        for family in {family.name: family for family in families.values()}.values():
            sizes = ", ".join(f"`{name}`" for name in family.sizes)
            rows.append(f"| {role} | {family.name} | {family.variants} | {sizes} |")
    return "\n".join(rows)


def config_facts(family: Family, config: ModelConfig) -> dict[str, Any]:
    _, state = abstract(family, config, make_mesh(data=1))
    tied = getattr(config, "tie_word_embeddings", None)
    return {
        "family": family.name,
        "parameters": sum(math.prod(leaf.shape) for leaf in weights.flat_state(state).values()),
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "heads": config.num_heads,
        "key/value heads": config.num_kv_heads,
        "head dimensions": config.head_dim,
        "MLP size": config.mlp_size,
        "activation": config.activation,
        "vocabulary": config.vocab_size,
        "context length": config.max_positions,
        "positions": config.position_kind,
        **({} if tied is None else {"tied": "head to embedding" if tied else "nothing"}),
    }


def weight_facts(family: Family, config: ModelConfig, path: Path) -> dict[str, Any]:
    """Format and dtypes of the weights, and whether they fit."""
    _, state = abstract(family, config, make_mesh(data=1))
    try:
        if checkpoint.there(path):
            checkpoint.check(path, state)
            return {"weights": "Orbax", "dtypes": checkpoint.dtype(path), "loads": "yes"}
        source = open_source(path)
        weights.match(family, state, config, source, str(path))
    except RalmError as error:
        return {"loads": f"no: {error}"}
    files = sorted({info.file for info in source.tensors.values()})
    dtypes = Counter(info.stored or info.dtype for info in source.tensors.values())
    return {
        "weights": files[0] if len(files) == 1 else f"{len(files)} files, {files[0]} the first",
        "dtypes": ", ".join(f"{dtype} ({count} tensors)" for dtype, count in dtypes.most_common()),
        "loads": "yes",
    }


def recipe_facts(root: Path) -> dict[str, Any]:
    """How an encoder's files say that a text's vector is made."""
    try:
        pooling, normalize, longest = stated_recipe(root)
    except RalmError as error:
        return {"loads": f"no: {error}"}
    limit = {} if longest == UNLIMITED else {"longest text": f"{longest:,} tokens"}
    return {"pooling": pooling or "not stated", "normalized": "yes" if normalize else "no", **limit}


def tokenizer_facts(model: str, config: ModelConfig) -> dict[str, Any]:
    """Kind and size of the tokenizer, and what it puts around a text."""
    try:
        tokenizer = load_tokenizer(model)
    except UsageError:
        return {"tokenizer": "none there"}
    except RalmError as error:
        return {"tokenizer": f"cannot be used: {error}"}
    name = tokenizer.backend.id_to_token
    before, after = ([f"{name(i)!r} ({i})" for i in ids] for ids in (tokenizer.prefix, tokenizer.suffix))
    size = tokenizer.backend.get_vocab_size()
    return {
        "tokenizer": f"{type(tokenizer.backend.model).__name__}, {size:,} tokens",
        "BOS policy": f"{' '.join(before) or 'nothing'} in front of a text, {' '.join(after) or 'nothing'} after it",
        **({"warning": f"the tokenizer has more tokens than the model ({size:,})"} if size > config.vocab_size else {}),
    }
