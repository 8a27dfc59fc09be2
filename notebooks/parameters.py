"""A notebook's parameters: its own defaults and the study's values, params/NAME.yaml."""

import ast
import json
import re
from pathlib import Path

INJECTED = ("quick", "device", "save_to")  # every notebook has them; the runner sets them


def read_cells(root: Path, stem: str) -> list[dict]:
    """Cells of the committed notebook."""
    return json.loads((root / f"notebooks/{stem}.ipynb").read_text(encoding="utf-8"))["cells"]


def read_defaults(root: Path, stem: str) -> dict[str, object]:
    """Names and literal values in the notebook's one cell tagged `parameters`."""
    where = f"notebooks/{stem}.ipynb"
    tagged = [c for c in read_cells(root, stem) if "parameters" in c["metadata"].get("tags", [])]
    if len(tagged) != 1:
        raise SystemExit(f"{where} must have one cell tagged `parameters`; got {len(tagged)}.")
    defaults = {}
    for node in ast.parse("".join(tagged[0]["source"])).body:
        try:
            (target,) = node.targets if isinstance(node, ast.Assign) else (node.target,)
            defaults[target.id] = ast.literal_eval(node.value)
        except (AttributeError, TypeError, ValueError):
            rule = f"{where}: a parameter is `name: type = literal`; got `{ast.unparse(node)}`."
            raise SystemExit(rule) from None
    if missing := [name for name in INJECTED if name not in defaults]:
        raise SystemExit(f"{where}: its parameters cell lacks {', '.join(missing)}.")
    return defaults


def read_study(root: Path, stem: str, defaults: dict[str, object]) -> dict[str, object]:
    """Values of params/STEM.yaml; refused when the notebook has no such name or another type."""
    import yaml  # here, so that the runner can judge its options on a bare Python

    where = f"params/{stem}.yaml"
    if not (root / where).is_file():
        raise SystemExit(f"{where} is missing; it holds the study's values for this notebook.")
    try:
        values = yaml.safe_load((root / where).read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise SystemExit(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise SystemExit(f"{where} must hold lines `name: value`; got {values!r}.")
    for name, value in values.items():
        if fault := _fault(name, value, defaults):
            raise SystemExit(f"{where}: {fault}")
    return values


def _fault(name: str, value: object, defaults: dict[str, object]) -> str:
    if name not in defaults:
        known = ", ".join(own for own in defaults if own not in INJECTED)
        return f"`{name}` is not a parameter of the notebook, which has {known}."
    if name in INJECTED:
        return f"`{name}` is set by the runner; remove it here."
    if _same_type(value, defaults[name]):
        return ""
    kind = type(defaults[name]).__name__
    hint = " YAML reads 1e-3 as text: write 1.0e-3 or 0.001." if _hides_number(value) else ""
    return f"`{name}` must be {kind} like {defaults[name]!r}; got {value!r}.{hint}"


def _same_type(value: object, default: object) -> bool:
    if isinstance(default, list) and isinstance(value, list):
        return not default or all(_same_type(item, default[0]) for item in value)
    # `is`, since True is an int too; a whole number may stand for a float.
    return type(value) is type(default) or (type(default) is float and type(value) is int)


def _hides_number(value: object) -> bool:
    texts = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]
    return any(re.fullmatch(r"[-+]?[\d.]+[eE][-+]?\d+", text) for text in texts)


def check_data(root: Path, stem: str, values: dict[str, object]) -> None:
    """Refuses a parameter `data` that names no file of data/; an empty one means simulated data."""
    name = values.get("data")
    if name and not (root / "data" / str(name)).is_file():
        raise SystemExit(f"data/{name}, named by the parameter `data` of {stem}, does not exist.")
