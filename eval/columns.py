"""Rows of text as columns for a terminal."""

from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> str:
    """`rows` under each other; columns are flush right, those numbered in `left` flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
