"""The command that writes text. As in `cli`, nothing heavy is imported before it runs."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from tyro.conf import create_mutex_group

from ralm_jax import processes
from ralm_jax.cli_options import APIOptions, ExcludeOptions, ReaderOptions, check_output_file, refuse_set
from ralm_jax.errors import UsageError
from ralm_jax.openai_client import is_api
from ralm_jax.settings import GenerateSettings, QuerySettings, RerankSettings, at_least

if TYPE_CHECKING:
    from ralm_jax.generate.generator import Generator
    from ralm_jax.generate.local import LocalGenerator
    from retrieval.generation import PassageFinder
    from retrieval.retriever import Retriever

log = logging.getLogger("ralm")

ONE_OF_PROMPT = create_mutex_group(required=True, title="what the text begins with")


@dataclass(frozen=True)
class RetrievalOptions:
    """Which passage stands in front."""

    stride: int = 4
    """Tokens from one retrieval to the next."""
    strategy: Literal["first", "zero-shot", "predictive"] = "first"
    """Whose first choice of the k passages: the retriever's, the reader's own, or that of --reranker."""
    reranker: str | None = None
    """For predictive: a folder that `ralm train reranker` made, or any BERT or RoBERTa with one label."""
    zero_shot_tokens: int = 16
    """Last tokens that zero-shot reranking goes by."""
    passage_tokens: int = 256
    """A passage is cut to so many tokens."""
    queries: QuerySettings = QuerySettings()
    reading: RerankSettings = RerankSettings()
    exclude: ExcludeOptions = ExcludeOptions()

    def __post_init__(self) -> None:
        at_least(1, stride=self.stride, zero_shot_tokens=self.zero_shot_tokens, passage_tokens=self.passage_tokens)
        if (self.strategy == "predictive") != (self.reranker is not None):
            raise UsageError("--strategy predictive needs --reranker, and no other strategy does")
        if self.reranker is None:
            refuse_set(self.reading, "--strategy predictive")

    def finder(self, index: "Retriever", local: "LocalGenerator", excluded: frozenset[str]) -> "PassageFinder":
        """What finds the passage, by the strategy."""
        from ralm_jax.cross_encoder import load_cross_encoder
        from ralm_jax.tokenizer import load_tokenizer
        from retrieval.generation import PassageFinder, predictive_ranker, zero_shot_ranker

        finder = PassageFinder(
            index, local.tokenizer, queries=self.queries, passage_tokens=self.passage_tokens, excluded=excluded
        )
        if self.strategy == "zero-shot":
            finder.rank = zero_shot_ranker(local, finder, stride=self.stride, past=self.zero_shot_tokens)
        elif self.reranker is not None:
            cross_encoder, own = load_cross_encoder(self.reranker), load_tokenizer(self.reranker)
            finder.rank = predictive_ranker(cross_encoder, own, finder, self.reading)
        return finder


@dataclass(frozen=True)
class Generate:
    """Write on after a prompt, with retrieval every few tokens, and tell where it came from."""

    model: str
    """The reader: a folder, a .gguf file, a Hugging Face id, or without --index openai:NAME or openai-chat:NAME for a
    server's."""
    prompt: Annotated[str | None, ONE_OF_PROMPT] = None
    """One prompt; its text is shown as it comes."""
    prompts: Annotated[str | None, ONE_OF_PROMPT] = None
    """A jsonl file of rows {"prompt"}."""
    index: str | None = None
    """Folder that `ralm index` made, any Lucene index, or lucene:NAME. Default: no retrieval."""
    chat: bool = False
    """A prompt is a user's message, in the chat template of the reader's tokenizer; without --index."""
    window: int | None = None
    """Tokens that passage, prompt and text may have together; the prompt loses tokens at its start. Default: the
    reader's positions."""
    attribution: Literal["text", "json"] | None = None
    """Also tell which passage stood in front of which tokens."""
    compare: bool = False
    """Also tell the log-probability that each token gained from its passage."""
    json: str | None = None
    """Write jsonl rows {"prompt", "text", "finish", …} to this file, not to the terminal; with --index, "segments"."""
    settings: GenerateSettings = GenerateSettings()
    retrieval: RetrievalOptions = RetrievalOptions()
    reader: ReaderOptions = ReaderOptions()
    api: APIOptions = APIOptions()

    def run(self) -> None:
        from ralm_jax.text import encodable, json_line, write_lines
        from retrieval.corpus import read_field

        if self.index is None:
            refuse_set(self, "--index", "attribution", "compare")
            if self.retrieval != RetrievalOptions():
                raise UsageError("--stride, --strategy and the other options of retrieval are for --index")
        elif self.chat:
            raise UsageError("--chat: is not for --index, whose passages stand in front of all that the reader reads")
        if self.chat and is_api(self.model):
            raise UsageError("--chat is for a reader on this machine; name a server's as openai-chat:NAME")
        check_output_file(self.json)
        prompts = read_field(self.prompts, "prompt") if self.prompts else [encodable(self.prompt or "", "--prompt")]
        shown = self.prompt is not None and self.json is None and self.attribution != "json"
        tell = (lambda place, piece: print(piece, end="", flush=True)) if shown else None
        found = self.plain(prompts, tell) if self.index is None else self.attributed(prompts, tell)
        lines = (json_line(row) for row, _ in found)
        if self.json and not processes.first():
            list(lines)
        elif self.json:
            print(f"{self.json}: {write_lines(self.json, lines):,} prompts")
        elif not shown:
            for line in lines:
                print(line, flush=True)
        else:
            ((_, told),) = found
            print(f"\n\n{told}" if told else "")

    def plain(self, prompts: list[str], tell: Any) -> Iterator[tuple[dict[str, Any], str]]:
        """The row of each prompt, in their order, as soon as it and those before it are finished."""
        generator, waiting, following, cut = self.reader.generator(self.model, self.window, self.api), {}, 0, 0
        asked = self.messages(prompts, generator) if self.chat else prompts
        with self.api.accounting(generator):
            for place, generation in generator.generate(asked, self.settings, tell=tell):
                waiting[place], cut = generation, cut + (generation.cut > 0)
                while following in waiting:
                    yield {"prompt": prompts[following]} | waiting.pop(following)._asdict(), ""
                    following += 1
        if cut:
            log.warning('%d prompts were too long and lost tokens at their start ("cut")', cut)

    def messages(self, prompts: list[str], generator: "Generator") -> list[str]:
        """Prompts as messages of a user, up to the answer.

        Raises:
            UsageError: the tokenizer of the reader, which is on this machine, has no chat template.
        """
        from ralm_jax.chat import around
        from ralm_jax.generate.local import LocalGenerator

        before, behind = around(cast(LocalGenerator, generator).tokenizer)
        return [before + prompt + behind for prompt in prompts]

    def attributed(self, prompts: list[str], tell: Any) -> Iterator[tuple[dict[str, Any], str]]:
        """The row of each prompt and its attribution in words, a batch after the other."""
        from ralm_jax.generate.local import LocalGenerator
        from ralm_jax.generate.ralm import generate_with_retrieval
        from retrieval.attribution import attributed_row, format_attribution
        from retrieval.retriever import open_index

        options, size = self.retrieval, self.reader.windows_a_batch() or 16
        index, excluded = open_index(self.index or ""), options.exclude.titles()
        local = self.reader.generator(self.model, self.window, self.api)
        if not isinstance(local, LocalGenerator):
            raise UsageError(f"{self.model}: a server's model cannot retrieve every few tokens; leave out --index")
        finder = options.finder(index, local, excluded)
        for start in range(0, len(prompts), size):
            batch = prompts[start : start + size]
            found = generate_with_retrieval(
                local, finder, batch, self.settings, stride=options.stride, compare=self.compare, tell=tell
            )
            for prompt, one in zip(batch, found, strict=True):
                words = format_attribution(one, finder) if self.attribution == "text" or self.compare else ""
                yield attributed_row(prompt, one, finder), words
