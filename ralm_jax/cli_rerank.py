"""The command about rerankers. As in `cli`, nothing heavy is imported before it runs."""

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import arg

from ralm_jax.cli_options import DeviceOptions, RerunOptions, TextOptions
from ralm_jax.errors import UsageError
from ralm_jax.settings import RerankSettings, at_least


@dataclass(frozen=True)
class Rerank:
    """Score retrieved passages with a trained reranker, for `ralm report --ranking`."""

    reranker: str
    """A BERT or RoBERTa with a classification head of one label: a folder or a Hugging Face id."""
    retrieval: str
    """RetrievalTable, or the paper's retrieval JSON."""
    out: str
    """Folder or bucket for the RankingTable."""
    text: TextOptions = TextOptions()
    index: str | None = None
    """The index of the RetrievalTable, if it has been moved."""
    tokenizer: str | None = None
    """The reader whose tokens make the strides. Default: where it was for `ralm retrieve`."""
    settings: RerankSettings = RerankSettings()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and computation."""
    batch_size: Annotated[int | Literal["auto"], arg(metavar="N|auto")] = "auto"
    """Pairs a forward; auto goes by their length."""
    devices: DeviceOptions = DeviceOptions()
    rerun: RerunOptions = RerunOptions()

    def run(self) -> None:
        from eval.lm import open_retrieved
        from ralm_jax.cross_encoder import load_cross_encoder
        from ralm_jax.tokenizer import load_tokenizer
        from retrieval.reranker import rerank

        batch_size = None if self.batch_size == "auto" else self.batch_size
        at_least(1, batch_size=batch_size)
        text = self.text.read()
        table, passages = open_retrieved(self.retrieval, self.index)
        reader = self.tokenizer or table.about.get("tokenizer")
        if reader is None:
            raise UsageError(f"{self.retrieval}: does not say whose tokens make its strides; add --tokenizer")
        made = rerank(
            load_cross_encoder(self.reranker, dtype=self.dtype, mesh=self.devices.own()),
            load_tokenizer(self.reranker),
            table,
            passages,
            text,
            load_tokenizer(reader),
            self.out,
            settings=self.settings,
            batch_size=batch_size,
            if_exists=self.rerun.if_exists,
        )
        others = int(((made.rows >= 0).any(axis=1) & (made.scores.argmax(axis=1) > 0)).sum())
        ranked, strides = int((made.rows >= 0).sum()), len(made.rows)
        print(f"{self.out}: {ranked:,} passages ranked; in {others:,} of {strides:,} strides another comes first")
