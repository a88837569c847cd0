#!/usr/bin/env bash
# One command: sets up whatever is missing, then runs everything that CI runs. Arguments go to pytest, and then only
# pytest runs, e.g.: scripts/test.sh tests/unit -k layout
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$top"
workers=$(env -u OMP_NUM_THREADS nproc) # nproc prints OMP_NUM_THREADS where that is set
export OMP_NUM_THREADS=1
# The pages are tested in a real browser. Without one, and without the right to install one, those tests say so and skip.
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >&2 || true
fi
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
ruff format --check src tests examples benchmarks scripts
ruff check src tests examples benchmarks scripts
lint-imports
pyright
# The trainers' frameworks have an environment of their own, which is set up meanwhile.
bash scripts/frameworks.sh &
frameworks=$!
# One process per core for what needs one; then, by themselves, the tests that start process groups or browsers.
failed=0
python -m pytest -n "$workers" --dist loadfile -m "not framework and not multiprocess and not browser" || failed=$?
python -m pytest -m "not framework and (multiprocess or browser)" || failed=$?
# Last, the tests of frameworks, which may not skip here.
if wait "$frameworks"; then
  # The documentation's blocks train in the tests' own process, from which no rank can be forked any more.
  SAMERUN_FRAMEWORKS=1 .venv-trainers/bin/python -m pytest -m framework --ignore tests/docs || failed=$?
  SAMERUN_FRAMEWORKS=1 .venv-trainers/bin/python -m pytest -m framework tests/docs || failed=$?
else
  echo "the environment of the frameworks, .venv-trainers, could not be set up: their tests did not run" >&2
  failed=1
fi
exit "$failed"
