"""What fewer retrievals cost, from a table to the terminal."""

import csv
from pathlib import Path

import pytest

from eval.metrics import text_perplexity
from eval.selective import SIGNALS, format_points, selective_points
from ralm_jax import cli, ranking
from ralm_jax.score_table import open_scores


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_model, text_file, corpus_file):
    """A folder with the ScoreTable `all/scores`; the current one."""
    monkeypatch.chdir(tmp_path)
    cli.main(["lm", "--model", str(tiny_model), "--text", "text.txt", "--corpus", "corpus.jsonl", "--out", "all",
              "--window", "64", "--stride", "16", "--k", "2"])  # fmt: skip
    return open_scores("all/scores")


def test_its_ends_are_never_and_always(place):
    chosen = ranking.zero_shot(place)
    for signal in SIGNALS.values():
        points = selective_points(place, chosen, signal(place, chosen, 16))
        never, always = (text_perplexity(place, policy) for policy in (ranking.none(place), chosen))
        assert (points[0].share, points[-1].share) == (0, 1)
        assert points[0].token_ppl == pytest.approx(never.token_ppl)
        assert points[-1].nll == pytest.approx(always.nll)


def test_command(place, capsys):
    capsys.readouterr()
    cli.main(["selective", "--scores", "all/scores", "--signal", "past-gain", "--csv", "c.csv", "--plot", "c.png"])
    printed = capsys.readouterr().out
    with open("c.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    best = min(float(row["token_ppl"]) for row in rows)
    assert f"Lowest, with hindsight: {best:.3f} where" in printed
    assert len(rows) == len(place.target) + 1
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")


def test_few_points_are_shown_once(place):
    points = selective_points(place, ranking.none(place), ranking.none(place) * 1.0)
    assert [point.share for point in points] == [0, 1]
    assert format_points(points).count("%") == 3


def test_refusals(place, capsys):
    for args, message in (
        (["--signal-tokens", "99"], "needs a table scored with --past 99 or more"),
        (["--csv", "no/c.csv"], "the folder no does not exist"),
    ):
        with pytest.raises(SystemExit) as caught:
            cli.main(["selective", "--scores", "all/scores", *args])
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
