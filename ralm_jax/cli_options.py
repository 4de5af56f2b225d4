"""Options that several commands share, and what they turn into. As in `cli`, nothing heavy is imported here."""

import json
import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from tyro.conf import arg, create_mutex_group

from ralm_jax import processes
from ralm_jax.errors import RalmError, UsageError
from ralm_jax.openai_client import CONCURRENCY, is_api
from ralm_jax.settings import AttentionName, IfExists, Split, TextDataset, WindowSettings, at_least

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jax.sharding import Mesh

    from ralm_jax.generate.generator import Generator
    from ralm_jax.reader import Reader
    from ralm_jax.reader_api import APIReader
    from ralm_jax.text import Text
    from ralm_jax.tokenizer import Tokenizer
    from retrieval.corpus import Passage
    from retrieval.rows import RowCount

log = logging.getLogger("ralm")

T = TypeVar("T")
ONE_OF_TEXT = create_mutex_group(required=True, title="the text")
ONE_OF_RERUN = create_mutex_group(required=False, title="output that is there")


@dataclass(frozen=True)
class TextOptions:
    """The text that is evaluated."""

    text: Annotated[str | None, ONE_OF_TEXT] = None
    """A file: plain, or jsonl rows (strings or {"text"}), compressed (gzip, zstd) or not."""
    dataset: Annotated[TextDataset | None, ONE_OF_TEXT] = None
    """A data set of the paper, from --data-path or the Hugging Face hub."""
    split: Split = "test"
    """Split of --dataset."""
    data_path: str | None = None
    """File or folder where --dataset lies. Default: the Hugging Face hub (needs ralm-jax[data])."""
    limit_rows: int | None = None
    """Only the first so many rows of --dataset. Default: all."""

    def read(self) -> "Text":
        from ralm_jax.text import read_text

        if self.dataset is None:
            refuse_set(self, "--dataset", "split", "data_path", "limit_rows")
            return read_text(self.text or "")
        from retrieval.datasets import dataset_text

        return dataset_text(self.dataset, self.split, self.data_path, self.limit_rows)


@dataclass(frozen=True)
class ExcludeOptions:
    """Articles that are left out of the search."""

    exclude_titles: str | None = None
    """File with one title a line; passages with these titles are left out."""
    exclude_titles_from: tuple[str, ...] = ()
    """Texts whose headings ("= Title =" or "# Title") are such titles. Default: WikiText-103's validation and test sets
    where it is the --dataset, nothing otherwise."""

    def titles(self, text: TextOptions | None = None) -> frozenset[str]:
        """
        Raises:
            UsageError: no such file.
            RalmError: a file without a title.
        """
        from ralm_jax.text import read_text
        from retrieval.titles import Titles, heading_titles, read_titles

        listed = read_titles(self.exclude_titles) if self.exclude_titles else frozenset()
        found: list[Titles] = []
        for path in self.exclude_titles_from:
            found.append(heading_titles(read_text(path).content))
            if found[-1] == Titles(frozenset(), ()):
                raise RalmError(f"{path}: no headings in it, which are lines as '= Title =' or '# Title'")
        if text and text.dataset and not self.exclude_titles_from:
            from retrieval.datasets import dataset_titles

            found += [heading_titles(content) for content in dataset_titles(text.dataset, text.split, text.data_path)]
        unknown = [heading for titles in found for heading in titles.unknown]
        if unknown:
            log.warning(
                "%d headings have <unk> and name no article (%s); name the raw text with --exclude-titles-from",
                len(unknown), ", ".join(unknown[:3]),
            )  # fmt: skip
        return listed.union(*(titles.spellings for titles in found))


@dataclass(frozen=True)
class RerunOptions:
    resume: Annotated[bool, ONE_OF_RERUN] = False
    """Go on where an earlier run stopped."""
    overwrite: Annotated[bool, ONE_OF_RERUN] = False
    """Replace what an earlier run left."""

    @property
    def if_exists(self) -> IfExists:
        return "resume" if self.resume else "overwrite" if self.overwrite else "refuse"


@dataclass(frozen=True)
class JobOptions:
    """Processes that make one job. Each is given the same command, and must see the same files and folders."""

    distributed: bool = False
    """Join the job's other processes as JAX finds them in the environment: on TPU pods, by SLURM, Open MPI or
    Kubernetes, or by JAX_COORDINATOR_ADDRESS."""
    coordinator: Annotated[str | None, arg(metavar="HOST:PORT")] = None
    """Join the job's other processes, of which number 0 runs at HOST and listens to PORT."""
    num_processes: int | None = None
    """Processes of the job; for --coordinator."""
    process_id: int | None = None
    """Which of them this is, from 0; for --coordinator."""

    def join(self) -> None:
        """Joins the job's other processes, if there are to be any, before anything uses a device.

        Raises:
            UsageError: they are not to be found, or options that do not go together.
        """
        named = (self.coordinator, self.num_processes, self.process_id)
        if self.distributed or any(one is not None for one in named):
            if self.distributed != all(one is None for one in named) or (not self.distributed and None in named):
                raise UsageError("name all of --coordinator, --num-processes and --process-id, or --distributed alone")
            processes.join(*named)


@dataclass(frozen=True)
class DeviceOptions(JobOptions):
    """The devices that models run on, of this process or of several that make one job. Each is given the same command,
    and must see the same files and folders."""

    mesh: Annotated[str, arg(metavar="data=N,fsdp=N,tensor=N|auto")] = "auto"
    """How devices share the work: data and fsdp split a batch, fsdp and tensor the weights. auto: all split the batch
    if each has room for the weights; otherwise tensor is as large as that takes."""

    def all(self) -> "Mesh | None":
        """The mesh of all devices of the job; None for auto.

        Raises:
            UsageError: what no mesh can be.
        """
        import jax

        return self._mesh(jax.devices)

    def own(self) -> "Mesh | None":
        """As `all`, of the devices of this process: for small models, of which every process has one."""
        import jax

        return self._mesh(jax.local_devices)

    def _mesh(self, devices: Callable[[], Sequence[Any]]) -> "Mesh | None":
        from ralm_jax.sharding import make_mesh, parse_mesh

        if self.mesh == "auto":
            return None
        sizes = parse_mesh(self.mesh)
        return make_mesh(sizes.get("data"), sizes.get("fsdp", 1), sizes.get("tensor", 1), devices=devices())


def job_options(command: Any) -> JobOptions | None:
    """Those of a command, wherever they are in it; None where it has none, and is a process by itself."""
    if isinstance(command, JobOptions):
        return command
    inner = (job_options(getattr(command, field.name)) for field in fields(command)) if is_dataclass(command) else ()
    return next((found for found in inner if found is not None), None)


@dataclass(frozen=True)
class CorpusOptions:
    """How the corpus becomes passages."""

    corpus_format: Literal["auto", "pyserini", "beir", "longbench", "scrolls", "dpr", "parquet", "arrow", "text"] = (
        "auto"
    )
    """Format of the files; auto goes by their names and first rows."""
    passage_words: int = 100
    """Running text is cut into passages of so many words; so are the documents of LongBench and SCROLLS."""
    split_rows: bool = False
    """Cut the rows of the other formats as well; they are passages as they are otherwise."""
    skip_bad_rows: bool = False
    """Skip and count rows that are broken; they are refused otherwise."""

    def read(self, corpus: str) -> "tuple[Iterator[Passage], RowCount]":
        """The passages, and what counts the rows while they are read."""
        from retrieval.corpus import read_corpus
        from retrieval.rows import RowCount

        count = RowCount(self.skip_bad_rows)
        passages = read_corpus(
            corpus, self.corpus_format, passage_words=self.passage_words, split_rows=self.split_rows, count=count
        )
        return passages, count

    def open(
        self, corpus: str | None, dataset: TextDataset | None, data_path: str | None
    ) -> "tuple[Iterator[Passage], RowCount, dict[str, Any]]":
        """As `read`, of a corpus or, where there is none, of the data set's own; and what they come from.

        Raises:
            UsageError: the data set has none.
        """
        from retrieval.corpus import describe_corpus
        from retrieval.datasets import check_own_corpus, dataset_corpus, describe_dataset
        from retrieval.rows import RowCount

        if corpus is not None:
            source = describe_corpus(
                corpus,
                self.corpus_format,
                passage_words=self.passage_words,
                split_rows=self.split_rows,
                skip_bad_rows=self.skip_bad_rows,
            )
            return *self.read(corpus), source
        if dataset is None:
            raise UsageError("name the corpus with --corpus, or a --dataset that has its own")
        refuse_set(self, "--corpus", "corpus_format", "split_rows")
        check_own_corpus(dataset, data_path)
        count = RowCount(self.skip_bad_rows)
        passages = dataset_corpus(dataset, data_path, passage_words=self.passage_words, count=count)
        source = describe_dataset(
            dataset, data_path, passage_words=self.passage_words, skip_bad_rows=self.skip_bad_rows
        )
        return passages, count, source


@dataclass(frozen=True)
class DenseOptions:
    """How a dense index is made."""

    encoder: str | None = None
    """Encoder of passages: a folder or a Hugging Face id (BERT or RoBERTa and their like), or openai:MODEL for a server
    that speaks OpenAI's API (OPENAI_BASE_URL and OPENAI_API_KEY from the environment)."""
    query_encoder: str | None = None
    """Encoder of queries. Default: the same one."""
    pooling: Literal["cls", "mean"] | None = None
    """From hidden states to a vector. Default: as the encoder states."""
    encoder_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation; vectors are stored in bfloat16."""
    devices: DeviceOptions = DeviceOptions()

    def index(self, corpus: "Iterator[Passage]", out: str, source: dict[str, Any], if_exists: IfExists) -> str:
        """Makes the index, and says what it is.

        Raises:
            UsageError: no encoder is named.
        """
        if self.encoder is None:
            raise UsageError("--engine dense: name a model with --encoder")
        from retrieval.dense import build_dense_index

        made = build_dense_index(
            corpus, out, self.encoder, self.query_encoder, pooling=self.pooling, dtype=self.encoder_dtype,
            mesh=self.devices.own(), source=source, if_exists=if_exists, announce=lambda line: print(line, flush=True),
        )  # fmt: skip
        return f"{len(made.passages):,} passages, vectors of {made.settings['dimension']:,} numbers"


@dataclass(frozen=True)
class APIOptions:
    """A model openai:NAME of a server that speaks OpenAI's API, which OPENAI_BASE_URL and OPENAI_API_KEY of the
    environment lead to."""

    concurrency: int = CONCURRENCY
    """Requests at the same time."""
    price_in: float = 0.0
    """Price of a million tokens that the server reads; with prices, the cost is told at the end."""
    price_out: float = 0.0
    """Price of a million tokens that it writes."""

    def check(self, model: str) -> None:
        """
        Raises:
            UsageError: a price that is none, or options that would be ignored, as `model` is no server's.
        """
        if not is_api(model):
            refuse_set(self, "a server's model, openai:NAME")
        for option, price in (("--price-in", self.price_in), ("--price-out", self.price_out)):
            if not 0 <= price < float("inf"):
                raise UsageError(f"{option} {price}: must be 0 or more")

    @contextmanager
    def accounting(self, model: Any) -> "Iterator[None]":
        """Tells at the end, of whatever kind, what was asked of a server, if `model` is on one."""
        try:
            yield
        finally:
            usage = getattr(model, "usage", None)
            if usage is not None:
                print(f"{model.name}: {usage.told(self.price_in, self.price_out)}", flush=True)


@dataclass(frozen=True)
class ReaderOptions:
    """How the reader is loaded and run."""

    tokenizer: str | None = None
    """Where the tokenizer is, if not with the model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and computation; log-probabilities are float32 always."""
    attention: AttentionName = "auto"
    """How attention is computed: xla everywhere, splash on TPUs, cudnn on GPUs in 16 bits; auto takes what the devices
    have."""
    batch_size: Annotated[int | Literal["auto"], arg(metavar="N|auto")] = "auto"
    """Windows a forward; auto fills the device."""
    devices: DeviceOptions = DeviceOptions()

    def windows_a_batch(self) -> int | None:
        """None for auto.

        Raises:
            UsageError: below 1.
        """
        if self.batch_size == "auto":
            return None
        at_least(1, batch_size=self.batch_size)
        return self.batch_size

    def check_no_devices(self) -> None:
        """
        Raises:
            UsageError: devices are named, which a server's model does not run on.
        """
        refuse_set(self.devices, "a reader on this machine")

    def generator(self, model: str, window: int | None, api: APIOptions) -> "Generator":
        """What writes text after prompts, on this machine or on a server.

        Raises:
            UsageError: no such model; or options that do not go with it.
            RalmError: the model cannot be loaded exactly.
        """
        from ralm_jax.generate import open_generator

        api.check(model)
        if is_api(model):
            refuse_set(self, "a reader on this machine", "tokenizer", "dtype", "attention", "batch_size")
            self.check_no_devices()
            if window is not None:
                raise UsageError("--window is for a reader on this machine; a server has its own")
        return open_generator(
            model,
            tokenizer=self.tokenizer,
            dtype=self.dtype,
            attention=self.attention,
            batch_size=self.windows_a_batch(),
            window=window,
            concurrency=api.concurrency,
            mesh=None if is_api(model) else self.devices.all(),
        )

    def load(self, model: str, api: APIOptions = APIOptions()) -> "tuple[Tokenizer, Reader | APIReader]":
        """The tokenizer and the reader, which may be a server's.

        Raises:
            UsageError: no such model; or options, or their lack, that do not go with it.
            RalmError: the model cannot be loaded exactly.
        """
        from ralm_jax.reader import load_reader
        from ralm_jax.reader_api import APIReader
        from ralm_jax.tokenizer import load_tokenizer

        api.check(model)
        if is_api(model):
            refuse_set(self, "a reader on this machine", "dtype", "attention", "batch_size")
            self.check_no_devices()
            reader = APIReader(model, concurrency=api.concurrency)
            if self.tokenizer is None:
                raise UsageError(f"{model}: name the folder or Hugging Face id of its tokenizer with --tokenizer")
            return load_tokenizer(self.tokenizer), reader
        tokenizer = load_tokenizer(self.tokenizer or model)
        return tokenizer, load_reader(model, dtype=self.dtype, mesh=self.devices.all(), attention=self.attention)


@dataclass(frozen=True)
class ReportOptions:
    """What is reported."""

    strategies: str = "none,first,zero-shot,oracle"
    """Of none, first, random, zero-shot, zero-shot-by (another reader), predictive (by a trained reranker), oracle, and
    mixture and predictive-mixture (all passages at once, weighted by the retriever or the reranker); separated by
    commas."""
    zero_shot_tokens: int = 16
    """Past tokens that zero-shot reranking goes by."""
    seed: int = 0
    """For random."""
    temperature: float = 1.0
    """For mixtures: weights are the softmax of scores divided by it."""
    compare: Annotated[str | None, arg(metavar="A,B")] = None
    """Also tell how many nats a token strategy A differs from B, with a 95% interval."""

    def names(self, *, ranked: bool = False, by_another: bool = False) -> list[str]:
        """The strategies to report, by what there is beside ScoreTables (`eval.report.check_strategies`)."""
        from eval.report import check_strategies

        at_least(1, zero_shot_tokens=self.zero_shot_tokens)
        at_least(0, seed=self.seed)
        if not self.temperature > 0:
            raise UsageError(f"--temperature {self.temperature}: must be above 0")
        self.compared(ranked=ranked, by_another=by_another)
        return check_strategies(self.strategies, ranked=ranked, by_another=by_another)

    def check_past(self, names: Sequence[str], windows: WindowSettings) -> None:
        """
        Raises:
            UsageError: fewer past tokens are to be scored than zero-shot reranking goes by.
        """
        if {"zero-shot", "zero-shot-by"} & set(names) and self.zero_shot_tokens > windows.past:
            raise UsageError(
                f"zero-shot reranking by {self.zero_shot_tokens} tokens needs as many past tokens, not "
                f"{windows.past}: raise --past, or lower --zero-shot-tokens"
            )

    def compared(self, *, ranked: bool, by_another: bool) -> list[str]:
        """The two strategies to compare, or none.

        Raises:
            UsageError: another number of them, or unknown ones.
        """
        from eval.report import check_strategies

        names = []
        if self.compare is not None:
            names = check_strategies(self.compare, ranked=ranked, by_another=by_another)
        if len(names) not in (0, 2):
            raise UsageError(f"--compare {self.compare}: name two strategies, separated by a comma")
        return names

    def show(
        self,
        tables: Sequence[str],
        json_file: str | None,
        rankings: Sequence[str] = (),
        rankers: Sequence[str] = (),
    ) -> None:
        """Prints the report of each ScoreTable; the JSON of one is an object, of several a list of them.

        Args:
            rankings: RankingTables, one for all ScoreTables or one for each.
            rankers: other readers' ScoreTables, likewise.

        Raises:
            UsageError: another number of them.
        """
        from eval.report import Beside, format_report, make_report
        from ralm_jax.text import write_text

        ranked, by_another = each(rankings, tables, "--ranking"), each(rankers, tables, "--zero-shot-by")
        there = {"ranked": bool(rankings), "by_another": bool(rankers)}
        names, compare = self.names(**there), self.compared(**there)
        beside = Beside(self.zero_shot_tokens, self.seed, self.temperature)
        reports = [
            make_report(table, names, beside=beside, ranked=own, by_another=other, compare=compare)
            for table, own, other in zip(tables, ranked, by_another, strict=True)
        ]
        if json_file:
            content = [report.to_json() for report in reports]
            write_text(json_file, json.dumps(content[0] if len(content) == 1 else content, indent=2) + "\n")
        print("\n\n".join(format_report(report) for report in reports))


def each(named: Sequence[str], tables: Sequence[str], option: str) -> list[str | None]:
    """What belongs to each of `tables`: the only one of `named`, its own, or None where there are none.

    Raises:
        UsageError: another number of them.
    """
    if len(named) not in (0, 1, len(tables)):
        raise UsageError(f"{option}: name one for all {len(tables)} ScoreTables, or one for each")
    return list(named) if len(named) == len(tables) else [*named, None][:1] * len(tables)


def refuse_set(options: Any, purpose: str, *names: str) -> None:
    """Refuses options that would be ignored.

    Args:
        names: fields of the dataclass `options`; all if none are named.

    Raises:
        UsageError: one of them is not what it is by default.
    """
    names = names or tuple(field.name for field in fields(options))
    if any(getattr(options, name) != getattr(type(options), name) for name in names):
        *others, last = ("--" + name.replace("_", "-") for name in names)
        listed = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        raise UsageError(f"{listed} for {purpose}")


def check_new_file(path: str, overwrite: bool) -> None:
    """As `check_output_file`, and keeps what is there.

    Raises:
        UsageError: `path` cannot be written, or is there already and `overwrite` is not set.
    """
    check_output_file(path)
    if Path(path).expanduser().is_file() and not overwrite:
        raise UsageError(f"{path}: is there already; add --overwrite to replace it")


def check_output_file(path: str | None) -> None:
    """Finds out before an hour of work that a file could not be written after it.

    Raises:
        UsageError: `path` is a folder, or the folder that it should go to is not there.
    """
    file = Path(path or ".").expanduser().absolute()
    if path and not file.parent.is_dir():
        raise UsageError(f"{path}: the folder {Path(path).parent} does not exist")
    if path and file.is_dir():
        raise UsageError(f"{path}: is a folder; name a file")


def distinct(name: str, values: tuple[T, ...]) -> tuple[T, ...]:
    """
    Raises:
        UsageError: there are none.
    """
    if not values:
        raise UsageError(f"--{name}: name at least one")
    return tuple(dict.fromkeys(values))
