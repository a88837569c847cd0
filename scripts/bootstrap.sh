#!/usr/bin/env bash
# Makes the virtual environment in .venv that the demo and the tests run in: pinned, torch first as a CPU build by
# plain pip. Does nothing when it is already there and nothing that it is made from has changed.
# Sourced by demo.sh, test.sh and frameworks.sh; leaves the environment active.
set -euo pipefail
top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${SAMERUN_VENV:-$top/.venv}
torch=${SAMERUN_TORCH:-torch==2.13.0}
more=${SAMERUN_MORE:-} # a file of further requirements

python=
for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
  if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  echo "samerun needs Python 3.11 or newer; none was found (set PYTHON=/path/to/python3.11)" >&2
  exit 1
fi

stamp=$({ cat "$top/pyproject.toml" "$top/requirements/constraints.txt" ${more:+"$more"}; echo "$torch $top"; "$python" -V; } | sha256sum)
if [ "$(cat "$venv/samerun.stamp" 2>/dev/null)" != "$stamp" ]; then
  echo "setting up $venv (a few minutes, once)" >&2
  if ! "$python" -m venv "$venv" 2>"$venv-error"; then
    # Debian splits the venv module off; put it in when that is possible, say what to do when it is not.
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
      apt-get update -qq >&2 && apt-get install -y -qq python3-venv >&2 && "$python" -m venv "$venv"
    else
      cat "$venv-error" >&2
      echo "install Python's venv module first, e.g.: sudo apt-get install python3-venv" >&2
      exit 1
    fi
  fi
  rm -f "$venv-error"
  # shellcheck disable=SC1091
  . "$venv/bin/activate"
  pip install --quiet --disable-pip-version-check "$torch" >&2
  pip install --quiet --disable-pip-version-check -c "$top/requirements/constraints.txt" ${more:+-r "$more"} \
    -e "$top[torch,dev]" >&2
  echo "$stamp" >"$venv/samerun.stamp"
else
  # shellcheck disable=SC1091
  . "$venv/bin/activate"
fi
