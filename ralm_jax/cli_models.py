"""Commands about models themselves. As in `cli`, nothing heavy is imported before one runs."""

import json
from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ralm_jax.cli_options import check_output_file


@dataclass(frozen=True)
class Inspect:
    """Tell what a model is, and whether it would load, without loading it."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A folder, a .gguf file, a Hugging Face id, or the name of a published size, such as llama2-70b."""
    json: str | None = None
    """Write the facts to this file as well."""

    def run(self) -> None:
        from ralm_jax.describe import describe
        from ralm_jax.text import write_text

        check_output_file(self.json)
        facts = describe(self.model)
        for name, value in facts.items():
            print(f"{name:18}{value:,}" if isinstance(value, int) else f"{name:18}{value}")
        if self.json:
            write_text(self.json, json.dumps({"model": self.model} | facts, indent=2, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Convert:
    """Write a model, with its tokenizer, in another format."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A folder, a .gguf file or a Hugging Face id; readers and encoders."""
    out: str
    """Folder for the result."""
    to: Literal["hf", "orbax"]
    """hf: config.json and safetensors, as transformers reads them. orbax: for pods, each process reading its part."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the result. Default: as stored."""

    def run(self) -> None:
        from ralm_jax.convert import convert

        convert(self.model, self.out, self.to, self.dtype)
        print(f"{self.out}: {self.model} as {self.to}")
