"""The paper's data sets by name: their texts, corpora and questions (In-Context RALM, sections 4.1 and 4.3), from files
or from the Hugging Face hub by `datasets`.
"""

import re
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ralm_jax.errors import RalmError, UsageError, first_line
from ralm_jax.settings import Split, at_least
from ralm_jax.text import Text, data_suffix, read_rows, read_text, refuse, row_text
from retrieval.corpus import Passage, cut_words, describe_files
from retrieval.qa import Question, json_question
from retrieval.results import read_questions
from retrieval.rows import OnBad, RowCount, arrow_rows, clean, field, json_entries, parquet_rows

WIKIPEDIA = (
    "Wikipedia of 2018-12-20 in passages of 100 words: download "
    "https://dl.fbaipublicfiles.com/dpr/wikipedia_split/psgs_w100.tsv.gz and name it with --corpus, or search "
    "lucene:wikipedia-dpr-100w"
)
SPLIT_WORDS = {"test": {"test"}, "validation": {"validation", "valid", "val", "dev"}, "train": {"train"}}
ROWS = re.compile(r"\.(jsonl|json|parquet|arrow|tokens|raw|txt|csv|tsv)(\.gz|\.zst)?$")
ABOUT = {"state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json"}  # of a `datasets` folder


class Dataset(NamedTuple):
    """Where a data set of the paper is found.

    Attributes:
        source: where people get it, for a message.
        hub: repository of the Hugging Face hub; empty if there is none.
        configuration: its configuration.
        test: what is called test in the paper, by the name it has there.
        raw: configuration with the same articles and no <unk> in their titles.
        subset: `pile_set_name` of its rows, where others are among them.
        own_corpus: its training split is its corpus; Wikipedia is otherwise.
    """

    source: str
    hub: str = ""
    configuration: str | None = None
    test: Split = "test"
    raw: str | None = None
    subset: str = ""
    own_corpus: bool = True


def pile(subset: str) -> Dataset:
    return Dataset(
        "The Pile (https://huggingface.co/datasets/monology/pile-uncopyrighted: test.jsonl.zst, val.jsonl.zst, train/)",
        "monology/pile-uncopyrighted",
        subset=subset,
    )


DATASETS = {
    "wikitext-103": Dataset(
        "WikiText-103 (https://huggingface.co/datasets/Salesforce/wikitext: wikitext-103-v1/)",
        "Salesforce/wikitext", "wikitext-103-v1", raw="wikitext-103-raw-v1", own_corpus=False,
    ),
    "realnews": Dataset("RealNews (https://github.com/rowanz/grover/tree/master/realnews: realnews.jsonl)"),
    "arxiv": pile("ArXiv"),
    "stackexchange": pile("StackExchange"),
    "freelaw": pile("FreeLaw"),
    "nq": Dataset(
        "NQ-open (https://github.com/google-research-datasets/natural-questions: nq_open/NQ-open.dev.jsonl)",
        "google-research-datasets/nq_open", "nq_open", test="validation", own_corpus=False,
    ),
    "triviaqa": Dataset(
        "TriviaQA (https://nlp.cs.washington.edu/triviaqa: triviaqa-unfiltered)",
        "mandarjoshi/trivia_qa", "unfiltered.nocontext", test="validation", own_corpus=False,
    ),
}  # fmt: skip


def dataset_text(name: str, split: Split = "test", path: str | None = None, limit_rows: int | None = None) -> Text:
    """The text of a split: its rows joined as the released code joins them, without any other normalisation.

    Args:
        path: a file, or a folder with the data set's files; None asks the hub.
        limit_rows: only the first so many rows.

    Raises:
        UsageError: no such file; or there is no path, and the hub does not have the data set or cannot be asked.
        RalmError: there are no rows of the split, or a broken one.
    """
    at_least(1, limit_rows=limit_rows)
    rows = islice(dataset_rows(name, split, path), limit_rows)
    content = "".join(row_text(row, where) or " \n" for where, row in rows)
    if not content.strip():
        raise RalmError(f"{path or name}: the split {split} of {name} has no text")
    return Text(content, f"{name} {split}")


def dataset_titles(name: str, split: Split = "test", path: str | None = None) -> Iterator[str]:
    """Texts whose headings are the articles that the paper took out of the corpus: WikiText-103's validation and test
    sets, where both are there; of other data sets none.

    Raises:
        UsageError, RalmError: as `dataset_text`.
    """
    dataset = DATASETS[name]
    if dataset.raw is None:
        return
    if path is None:
        for held_out in ("validation", "test"):
            rows = hub_rows(name, dataset._replace(configuration=dataset.raw), held_out)
            yield "".join(row_text(row, where) for where, row in rows)
    elif Path(path).expanduser().is_dir():
        for file in folder_files(path, "validation") + folder_files(path, "test"):
            yield "".join(row_text(row, where) for where, row in file_rows(file))
    else:
        yield dataset_text(name, split, path).content


def dataset_corpus(
    name: str, path: str | None = None, *, passage_words: int = 100, count: RowCount | None = None
) -> Iterator[Passage]:
    """The passages of a data set's own training split, which is its corpus in the paper, cut as `read_corpus` cuts.

    Raises:
        UsageError: as `dataset_text`, or as `check_own_corpus`.
        RalmError: as `dataset_text`.
    """
    at_least(1, passage_words=passage_words)
    check_own_corpus(name, path)
    count, number = count or RowCount(), 0
    for where, row in dataset_rows(name, "train", path, count.on_bad):
        try:
            text = clean(row_text(row, where), where)
            title = field(row, ["title"], where, default="") if isinstance(row, dict) else ""
        except RalmError as error:
            count.on_bad(error)
            continue
        count.rows += 1
        for i, words in enumerate(cut_words(text, passage_words)):
            yield Passage(f"{number}-{i}", title, words)
        number += 1


def check_own_corpus(name: str, path: str | None) -> None:
    """
    Raises:
        UsageError: the paper's corpus for this data set is Wikipedia; or `path` is a file, and neither its name, its
            folder's nor its first row says that it has the training split: it may be the text that is evaluated.
    """
    if not DATASETS[name].own_corpus:
        raise UsageError(f"{name} has no corpus of its own; the paper's is {WIKIPEDIA}")
    file = Path(path or ".").expanduser().absolute()
    if file.is_file() and "train" not in splits_of(file.name, file.parent.name):
        _, row = next(
            file_rows(file, lambda error: None), ("", None)
        )  # whoever reads the rows finds out about bad ones
        if not isinstance(row, dict) or not isinstance(row.get("split"), str):
            raise UsageError(
                f"{path}: nothing says that it is the training split, which is the corpus of {name}; name the folder, "
                "or --corpus"
            )


def describe_dataset(name: str, path: str | None, **settings: Any) -> dict[str, Any]:
    """What the passages of `dataset_corpus` depend on, without reading them."""
    files = describe_files(split_files(name, "train", path)) if path else None
    return {"dataset": name, "split": "train", "files": files, **settings}


def dataset_questions(name: str, split: Split = "test", path: str | None = None) -> list[Question]:
    """The questions of a split. "test" is what the field calls so: both data sets' development sets, whose answers are
    public.

    Raises:
        UsageError, RalmError: as `dataset_text`, or as `read_questions`.
    """
    files = split_files(name, split, path) if path else []
    if files and not all(file.suffix in (".parquet", ".arrow") for file in files):
        return [question for file in files for question in read_questions(str(file))]
    rows = dataset_rows(name, split, path)
    return [json_question(as_object(row, where), where, str(i)) for i, (where, row) in enumerate(rows)]


def as_object(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise RalmError(f"{where}: expected an object, found {type(row).__name__}")
    return row


# --- rows ---


def dataset_rows(name: str, split: Split, path: str | None, on_bad: OnBad = refuse) -> Iterator[tuple[str, Any]]:
    """Place and value of every row of a split: a string, or an object with "text" or with a question."""
    dataset = DATASETS[name]
    if path is None:
        yield from hub_rows(name, dataset, dataset.test if split == "test" else split)
        return
    others: set[str] = set()
    some = False
    for file in split_files(name, split, path):
        for where, row in file_rows(file, on_bad):
            other = foreign(row, dataset, split)
            if other is None:
                some = True
                yield where, row
            else:
                others.add(other)
    if not some:
        found = f"; its rows are of {', '.join(sorted(others))}" if others else ""
        raise RalmError(f"{path}: no rows of {name}, split {split}{found}")


def foreign(row: Any, dataset: Dataset, split: Split) -> str | None:
    """What a row says it is of instead: another part of The Pile, another split of RealNews; None if it is ours."""
    if not isinstance(row, dict):
        return None
    meta, stated = row.get("meta"), row.get("split")
    if dataset.subset and isinstance(meta, dict) and meta.get("pile_set_name", dataset.subset) != dataset.subset:
        return str(meta["pile_set_name"])
    return str(stated) if isinstance(stated, str) and stated not in SPLIT_WORDS[split] else None


def file_rows(file: Path, on_bad: OnBad = refuse) -> Iterator[tuple[str, Any]]:
    """Place and value of every row of a file of texts; running text is one row.

    Raises:
        UsageError: a table of which nobody knows where its text is.
    """
    suffix = data_suffix(file)
    if suffix in (".parquet", ".arrow"):
        return (parquet_rows if suffix == ".parquet" else arrow_rows)(file, on_bad, columns=None)
    if suffix == ".json":
        return ((where, row) for where, _, row in json_entries(file, on_bad))
    if suffix in (".csv", ".tsv"):
        raise UsageError(f'{file}: texts are not read from {suffix}; make it jsonl rows {{"text"}}, or Parquet')
    return read_rows(file, on_bad) if suffix == ".jsonl" else iter([(str(file), read_text(str(file)).content)])


def split_files(name: str, split: Split, path: str) -> list[Path]:
    """`path` if it is a file; the files of a folder whose names say that they are of the split.

    Raises:
        UsageError: there are none, or the same rows in more than one form; or the file's name names another split.
    """
    root, dataset = Path(path).expanduser(), DATASETS[name]
    there = dataset.test if split == "test" else split
    if not root.is_dir():
        if not root.exists():
            raise UsageError(f"{path}: no such file or folder; {dataset.source} should be there")
        stated = splits_of(root.name)
        if stated and not stated & {split, there}:
            raise UsageError(f"{path}: has {stated.pop()} in its name, and the split is {split}; name it with --split")
        return [root]
    files = folder_files(path, split) or folder_files(path, there)
    if not files:
        raise UsageError(f"{path}: no file in it has {split} in its name; {dataset.source} should be there")
    if dataset.configuration is None:
        return files
    # the folder's name in the repository, and in the archive that came before it
    spellings = {dataset.configuration, dataset.configuration.removesuffix("-v1")}
    chosen = [file for file in files if spellings & set(file.relative_to(root).parts)] or files
    forms = {(file.parent, *form_of(file)): str(file.relative_to(root)) for file in chosen}
    if len(forms) > 1:
        listed = ", ".join(forms.values())
        raise UsageError(
            f"{path}: the split {split} of {name} is in it more than once ({listed}); name the one to read"
        )
    return chosen


def form_of(file: Path) -> tuple[str, str]:
    """What the numbered files of one split have in common: the name up to the number, and the suffix."""
    return re.split(r"\d", file.name)[0], data_suffix(file)


def splits_of(*names: str) -> set[str]:
    """The splits that names of files and folders have as a word."""
    words = set(re.split("[^a-z]+", " ".join(names).lower()))
    return {split for split, spellings in SPLIT_WORDS.items() if words & spellings}


def folder_files(path: str, split: str) -> list[Path]:
    """The files of rows below a folder whose names, or those of folders between, have the split's name as a word."""
    root, found = Path(path).expanduser(), []
    for file in sorted(root.rglob("*")):
        place = str(file.relative_to(root))
        hidden = any(part.startswith(".") for part in Path(place).parts)
        # TriviaQA's test set comes "without-answers"
        if split in splits_of(place) and not hidden and "without" not in place.lower():
            found += [file] if file.is_file() and ROWS.search(file.name) and file.name not in ABOUT else []
    return found


def hub_rows(name: str, dataset: Dataset, split: Split) -> Iterator[tuple[str, Any]]:
    """
    Raises:
        UsageError: `datasets` is not installed, or the hub does not have the data set.
        RalmError: the hub cannot be reached, or has no such split.
    """
    by_hand = f"get {dataset.source} and name its file or folder with --data-path"
    if not dataset.hub:
        raise UsageError(f"{name} is not on the Hugging Face hub: {by_hand}")
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"{name}: fetching it from the Hugging Face hub needs pip install 'ralm-jax[data]'; or {by_hand}"
        ) from None
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        # of The Pile only what is read, of the others a copy that is kept
        rows = datasets.load_dataset(dataset.hub, dataset.configuration, split=split, streaming=bool(dataset.subset))
        for number, row in enumerate(rows, start=1):
            if foreign(row, dataset, split) is None:
                yield f"{dataset.hub} {split}: row {number}", row
    except (OSError, ValueError, RuntimeError) as error:
        raise RalmError(
            f"{name}: {dataset.hub} cannot be read from the Hugging Face hub ({first_line(error)}); or {by_hand}"
        ) from None
