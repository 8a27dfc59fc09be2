"""README's claims table: the rows of results/claims_*.csv as one generated block."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"


class Claim(NamedTuple):
    """One row: what the paper says, what we found, the verdict and the notebook that shows it."""

    claim: str
    paper: str
    ours: str
    verdict: str
    notebook: str


def read_rows(root: Path) -> list[Claim]:
    """Rows of every results/claims_*.csv, files by name and rows in their order."""
    rows = []
    for path in sorted((root / "results").glob("claims_*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if tuple(table.fieldnames or ()) != Claim._fields:
                raise SystemExit(
                    f"results/{path.name} must have the columns {', '.join(Claim._fields)}; "
                    f"got {table.fieldnames}."
                )
            rows += [Claim(**row) for row in table]
    return rows


def render(rows: Sequence[Claim]) -> str:
    """Markdown table of the claims; a notebook's cell links to it by its number."""
    lines = ["| " + " | ".join(Claim._fields) + " |", "|" + "---|" * len(Claim._fields)]
    for row in rows:
        *cells, notebook = (_cell(text) for text in row)
        link = f"[{notebook[:2]}](notebooks/{notebook}.ipynb)"
        lines.append("| " + " | ".join([*cells, link]) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def replace_block(text: str, table: str) -> str:
    """The text with the table between its claims markers, which must be there once, in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise SystemExit(f"README.md must have one block {BEGIN} … {END} for the claims table.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def update_readme(root: Path) -> None:
    """Rewrites README's block from results/; the file is touched only when the block changes."""
    readme = root / "README.md"
    if not readme.is_file():
        raise SystemExit("README.md is missing, so the claims table has no place.")
    old = readme.read_text(encoding="utf-8")
    new = replace_block(old, render(read_rows(root)))
    if new != old:
        readme.write_text(new, encoding="utf-8")
