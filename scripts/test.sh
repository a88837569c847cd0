#!/usr/bin/env bash
# One command: sets up whatever is missing, then runs everything that CI runs. Arguments go to pytest, and then only
# pytest runs, e.g.: scripts/test.sh tests/unit -k layout
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$top"
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
# One process per core for what needs one; then, by themselves, the tests that start process groups or browsers.
failed=0
python -m pytest -n "$(nproc)" --dist loadfile -m "not multiprocess and not browser" || failed=$?
python -m pytest -m "multiprocess or browser" || failed=$?
exit "$failed"
