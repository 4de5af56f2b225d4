"""The command about retrieval that is not always worth it. As in `cli`, nothing heavy is imported before it runs."""

from dataclasses import dataclass
from typing import Literal

from ralm_jax.cli_options import check_output_file
from ralm_jax.settings import at_least


@dataclass(frozen=True)
class Selective:
    """What fewer retrievals cost: perplexity where only strides above a threshold have their passage."""

    scores: str
    """ScoreTable."""
    strategy: Literal["first", "zero-shot"] = "first"
    """Which passage a stride has when it retrieves."""
    signal: Literal["surprise", "past-gain"] = "surprise"
    """What goes above a threshold. surprise: how badly the last prefix tokens were predicted without passage, known
    before anything is retrieved. past-gain: how much better the passage makes them, known once the window is scored."""
    signal_tokens: int = 16
    """Prefix tokens that the signal and zero-shot reranking go by."""
    csv: str | None = None
    """Write every point of the curve to this file."""
    plot: str | None = None
    """Draw it to this PNG file."""

    def run(self) -> None:
        from eval.report import Beside, policies
        from eval.selective import SIGNALS, draw, format_csv, format_points, selective_points
        from ralm_jax.score_table import open_scores
        from ralm_jax.text import write_text

        at_least(1, signal_tokens=self.signal_tokens)
        check_output_file(self.csv)
        check_output_file(self.plot)
        scores = open_scores(self.scores)
        chosen = policies(Beside(self.signal_tokens))[self.strategy](scores)
        points = selective_points(scores, chosen, SIGNALS[self.signal](scores, chosen, self.signal_tokens))
        if self.csv:
            write_text(self.csv, format_csv(points))
        if self.plot:
            draw(self.plot, points, self.signal, f"{scores.about['reader']} on {scores.about['text']}, {self.strategy}")
        print(format_points(points))
