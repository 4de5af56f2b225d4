"""What holds for the project as a whole."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import eval.sample

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "ralm_jax": {"ralm_jax"},
    "retrieval": {"ralm_jax", "retrieval"},
    "eval": {"ralm_jax", "retrieval", "eval"},
    "train": {"ralm_jax", "retrieval", "eval", "train"},
}


def imports(path, *, top_level):
    """Names of modules that a file imports; with `top_level`, only those outside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if top_level and id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_imports_point_one_way():
    for package, allowed in ALLOWED.items():
        for path in (ROOT / package).rglob("*.py"):
            only_top = path.name.startswith("cli")
            ours = {name.split(".")[0] for name in imports(path, top_level=only_top)} & ALLOWED.keys()
            assert ours <= allowed, path


def test_inside_ralm_jax_the_lower_do_not_know_the_upper():
    order = ["errors", "config", "sharding", "rope", "attention", "layers", "stack", "models", "model", "reader",
             "scoring"]  # fmt: skip
    for i, name in enumerate(order):
        base = ROOT / "ralm_jax" / name
        for path in [base.with_suffix(".py")] if base.with_suffix(".py").exists() else base.glob("*.py"):
            for module in imports(path, top_level=False):
                parts = module.split(".")
                if parts[0] == "ralm_jax" and len(parts) > 1 and parts[1] in order:
                    assert order.index(parts[1]) <= i, (path, module)


def test_tables_and_rankings_need_numpy_alone():
    code = (
        "import sys, ralm_jax.windows, ralm_jax.score_table, ralm_jax.ranking, eval.metrics, eval.retrieval_metrics,"
        "eval.answers, eval.long_metrics;"
        "sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'torch', 'tokenizers', 'tensorstore', 'scipy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_torch_is_never_imported_by_the_product():
    for package in ALLOWED:
        for path in (ROOT / package).rglob("*.py"):
            names = {name.split(".")[0] for name in imports(path, top_level=False)}
            assert not names & {"torch", "transformers"}, path


def test_the_readme_says_what_is_supported():
    from ralm_jax.describe import support_table

    assert support_table() in (ROOT / "README.md").read_text()


class TestSample:
    folder = Path(eval.sample.__file__).parent

    def rows(self):
        return [json.loads(line) for line in (self.folder / "corpus.jsonl").read_text().splitlines()]

    def test_passages(self):
        rows = self.rows()
        assert len(rows) >= 80
        assert len({row["id"] for row in rows}) == len(rows)
        assert all(80 <= len(row["text"].split()) <= 105 for row in rows)

    def test_the_chronicle_quotes_no_passage(self):
        """It leans on the facts of the corpus; no run of eight words stands in both."""
        words = lambda text: "".join(c if c.isalnum() else " " for c in text.lower()).split()  # noqa: E731
        runs = lambda text: {tuple(words(text)[i : i + 8]) for i in range(len(words(text)) - 7)}  # noqa: E731
        chronicle = runs((self.folder / "chronicle.txt").read_text())
        for row in self.rows():
            assert not chronicle & runs(f"{row['title']} {row['text']}"), row["id"]

    def test_the_chronicle_is_long_enough(self, smollm2_gguf):
        from ralm_jax.tokenizer import load_tokenizer

        text = (self.folder / "chronicle.txt").read_text()
        assert len(load_tokenizer(str(smollm2_gguf)).encode(text)) >= 1500
