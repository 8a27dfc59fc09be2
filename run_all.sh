#!/usr/bin/env bash
# Sets up .venv when no usable environment is active, then hands over to notebooks/run.py, which
# knows the options: ./run_all.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
ROOT=$PWD
STAMP=.venv/.set-up

die() {
  echo "run_all.sh: $1" >&2
  exit 1
}

is_311() {
  "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in python3.11 python3 python; do
    if is_311 "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "Python 3.11 was not found; install it (Debian 12: apt install python3.11 python3.11-venv), or activate an environment made from environment.yml."
}

# The active environment's Python, when it holds every package of requirements.txt and this lib.
active_python() {
  local prefix=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
  if [ -z "$prefix" ] || [ "$prefix" = "$ROOT/.venv" ]; then
    return 1
  fi
  if "$prefix/bin/python" -P - 2>/dev/null <<'PY'; then
import sys
from importlib import metadata, util
from pathlib import Path

for line in Path("requirements.txt").read_text().splitlines():
    if line[:1].isalpha():
        metadata.version(line.strip())
sys.exit(Path(util.find_spec("lib").origin).parent != Path("lib").resolve())
PY
    echo "$prefix/bin/python"
  else
    echo "The active environment lacks a package of requirements.txt or this lib; using .venv instead." >&2
    return 1
  fi
}

# False for an environment that a kill left half made, that was made in another folder (its scripts
# hold absolute paths), or whose Python is not 3.11.
is_reusable() {
  case $1 in
    "" | *" in $ROOT") is_311 .venv/bin/python && .venv/bin/python -m pip --version >/dev/null 2>&1 ;;
    *) return 1 ;;
  esac
}

set_up() {
  local wanted found python
  unset PYTHONPATH # packages that lie there would count as installed
  wanted="$(cat requirements.txt constraints.txt pyproject.toml | cksum) in $ROOT"
  found=$(cat "$STAMP" 2>/dev/null || true)
  if [ "$found" = "$wanted" ]; then
    return
  fi
  if ! is_reusable "$found"; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
      die "$python has no venv module, which .venv needs; install it (Debian: apt install python3.11-venv)."
    echo "Making .venv"
    # pip comes second, so that an environment without a stamp and with pip is one made by hand.
    "$python" -m venv --clear --without-pip .venv || die "could not make .venv."
    echo unfinished >"$STAMP"
    .venv/bin/python -m ensurepip --default-pip >/dev/null || die "could not put pip into .venv."
  fi
  echo unfinished >"$STAMP"
  .venv/bin/python -m pip install --disable-pip-version-check --no-input -r requirements.txt ||
    die "pip could not install requirements.txt (its last lines say why); run this again when that is mended."
  .venv/bin/python -c 'import matplotlib, papermill, torch' || die "the installed packages do not load; delete .venv and run this again."
  echo "$wanted" >"$STAMP"
}

# Every suite runs, whatever the ones before it found.
run_tests() {
  local python=$1 summary="" failed=0
  suite() {
    local name=$1
    shift
    echo "== $name"
    # pytest says 5 for 'no tests': that is a failure too.
    if "$python" -m pytest "$@"; then
      summary+="passed: $name"$'\n'
    else
      summary+="FAILED: $name (pytest exit code $?)"$'\n'
      failed=1
    fi
  }
  suite "tests with shapes checked" --jaxtyping-packages=lib,beartype.beartype -m "not compiled"
  suite "compiled training step" -m compiled
  suite "notebooks replayed" --nbval notebooks
  printf '\n%s' "$summary"
  return "$failed"
}

# One thread, so that numbers are those that were committed; and two threads of which one waits for
# a core that is busy elsewhere take several times as long as one.
export OMP_NUM_THREADS=1

mode=run
for argument in "$@"; do
  case $argument in
    --setup) mode=setup ;;
    --test) mode=test ;;
    --help | -h) mode=help ;;
  esac
done

python=""
if [ "$mode" != setup ]; then
  python=$(active_python) || true
fi
# A slip in the options is told before minutes of set-up.
judge=${python:-$(find_python)}
"$judge" notebooks/run.py --check "$@" || exit $?
if [ "$mode" = help ]; then
  exit 0
fi
if [ -z "$python" ]; then
  set_up
  python=.venv/bin/python
fi
case $mode in
  setup) echo "Ready: source .venv/bin/activate" ;;
  test) run_tests "$python" ;;
  run) exec "$python" notebooks/run.py "$@" ;;
esac
