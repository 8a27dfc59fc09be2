"""README's generated blocks: the claims of results/claims_*.csv, and what the full run took."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"
TIMES_BEGIN, TIMES_END = "<!-- times:begin -->", "<!-- times:end -->"


class Claim(NamedTuple):
    """One row: what the paper says, what we found, the verdict and the notebook that shows it."""

    claim: str
    paper: str
    ours: str
    verdict: str
    notebook: str  # or the study


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
    """Markdown table of the claims; the last cell links to the notebook, or to the study."""
    lines = ["| " + " | ".join(Claim._fields) + " |", "|" + "---|" * len(Claim._fields)]
    for row in rows:
        *cells, notebook = (_cell(text) for text in row)
        study = f"[{notebook}](benchmarks/{notebook}.py)"
        link = f"[{notebook[:2]}](notebooks/{notebook}.ipynb)" if notebook[0].isdigit() else study
        lines.append("| " + " | ".join([*cells, link]) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def render_times(root: Path) -> str:
    """One sentence from results/manifest.csv: minutes of each notebook, and on what device."""
    with (root / "results/manifest.csv").open(newline="", encoding="utf-8") as file:
        # A study that is run by name only has a name without a number.
        rows = {r["notebook"]: r for r in csv.DictReader(file) if r["notebook"][:2].isdigit()}
    minutes = {stem[:2]: float(row["seconds"]) / 60 for stem, row in sorted(rows.items())}
    parts = ", ".join(f"{number}: {value:.1f}" for number, value in minutes.items())
    devices = " and ".join(sorted({row["device"] for row in rows.values()}))
    return f"The committed run took {sum(minutes.values()):.0f} minutes ({parts}) on {devices}."


def replace_block(text: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """The text with the content between a pair of markers, which must be there once, in order."""
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end) or begin in rest or end in before + after:
        raise SystemExit(f"README.md must have one block {begin} … {end}, which a run writes.")
    return f"{before}{begin}\n{content}\n{end}{after}"


def render_readme(root: Path) -> str:
    """README.md with both blocks as results/ has them."""
    readme = root / "README.md"
    if not readme.is_file():
        raise SystemExit("README.md is missing, so the claims table has no place.")
    text = replace_block(readme.read_text(encoding="utf-8"), render(read_rows(root)))
    return replace_block(text, render_times(root), TIMES_BEGIN, TIMES_END)


def update_readme(root: Path) -> None:
    """Rewrites README's blocks from results/; the file is touched only when a block changes."""
    readme, new = root / "README.md", render_readme(root)
    if new != readme.read_text(encoding="utf-8"):
        readme.write_text(new, encoding="utf-8")
