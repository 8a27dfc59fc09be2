"""Makes the committed outputs: runs the notebooks in place at their quick values and cleans them.

    OMP_NUM_THREADS=1 python notebooks/refresh.py [NAME...]

A second run changes nothing but the outputs of cells tagged `nbval-ignore-output`.
"""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from run import ROOT, select

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook, run from its own folder at the values of its parameters cell."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=600,
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        store_widget_state=False,
        coalesce_streams=True,  # how a stream is cut into messages is chance
    )
    return client.execute()


def clean(notebook: nbformat.NotebookNode) -> None:
    """Drops what differs between machines and runs: names, versions, times, ids, widget models."""
    notebook.metadata = nbformat.from_dict(METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict({k: v for k, v in cell.metadata.items() if k == "tags"})
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(WIDGET, None)  # its model is gone; the text beside it stays


def main(names: list[str]) -> int:
    """Refreshes each notebook; one that fails is left as it was."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the kernels inherit it
    failed = 0
    for stem in select(ROOT, names):
        path = ROOT / f"notebooks/{stem}.ipynb"
        try:
            notebook = execute(path)
        except CellExecutionError as error:
            sentence = f"{stem} failed and is left as it was: {error.ename}: {error.evalue}"
            print(sentence, file=sys.stderr)
            failed += 1
            continue
        clean(notebook)
        nbformat.validate(notebook)
        nbformat.write(notebook, path)
        print(f"{stem}: refreshed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
