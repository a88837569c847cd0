#!/usr/bin/env bash
# One command: sets up whatever is missing, then runs everything that CI runs. Arguments go to pytest, and then only
# pytest runs, e.g.: scripts/test.sh tests/unit -k layout
# With --all alone, the tests marked `long` run too, which repeat at length what others prove.
set -euo pipefail
chosen=" and not long"
if [ "$*" = --all ]; then
  chosen=
  shift
fi
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
cd "$top"
workers=$(env -u OMP_NUM_THREADS nproc) # nproc prints OMP_NUM_THREADS where that is set
export OMP_NUM_THREADS=1

checks() {
  local failed=0 code=(src tests examples benchmarks scripts)
  ruff format --check "${code[@]}" || failed=1
  ruff check "${code[@]}" || failed=1
  lint-imports || failed=1
  pyright || failed=1
  return "$failed"
}

# The tests of frameworks, in an environment of their own. They may not skip there.
frameworks() {
  local failed=0 python=.venv-trainers/bin/python
  if ! bash scripts/frameworks.sh; then
    echo "the environment of the frameworks, .venv-trainers, could not be set up: their tests did not run"
    return 1
  fi
  export SAMERUN_FRAMEWORKS=1
  "$python" -m pytest "${spread[@]}" -m "framework$chosen" --ignore tests/docs || failed=1
  # The documentation's blocks train in the tests' own process, from which no rank can be forked any more.
  "$python" -m pytest -m framework tests/docs || failed=1
  return "$failed"
}

# Runs a function beside what follows; what it has to say is shown by `join`, which passes on how it ended.
beside() {
  "$1" >"$reports/$1" 2>&1 &
  jobs[$1]=$!
}

join() {
  local failed=0
  wait "${jobs[$1]}" || failed=1
  cat "$reports/$1"
  return "$failed"
}

if [ $# -eq 0 ]; then
  declare -A jobs
  reports=$(mktemp -d)
  trap 'rm -rf "$reports"' EXIT
  # One process per core; the tests of a file stay in one, and files with slow tests come first.
  spread=(-n "$workers" --dist loadfile --no-loadscope-reorder)
  beside frameworks
  beside checks
fi
# The pages are tested in a real browser. Without one, and without the right to install one, those tests say so and skip.
if ! command -v chromium >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >&2 || true
fi
if [ $# -gt 0 ]; then
  exec python -m pytest "$@"
fi
failed=0
# Ranks are forked from processes in which no other tests have started threads: these are processes of their own.
python -m pytest "${spread[@]}" -m "not framework and (multiprocess or browser)$chosen" || failed=1
python -m pytest "${spread[@]}" -m "not framework and not multiprocess and not browser$chosen" || failed=1
join checks || failed=1
join frameworks || failed=1
exit "$failed"
