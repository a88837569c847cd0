#!/usr/bin/env bash
# Makes the environment in .venv-trainers in which the tests of trainers and other frameworks run. Does nothing when it
# is already there and nothing that it is made from has changed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export SAMERUN_VENV="$here/../.venv-trainers" SAMERUN_MORE="$here/../requirements/frameworks.txt"
export DS_ACCELERATOR=cpu DS_BUILD_OPS=0 # DeepSpeed would build kernels for GPUs
. "$here/bootstrap.sh"
loose="$here/../requirements/torchtitan.txt"
if ! cmp -s "$loose" "$SAMERUN_VENV/torchtitan.stamp"; then
  pip install --quiet --disable-pip-version-check --no-deps -r "$loose" >&2
  cp "$loose" "$SAMERUN_VENV/torchtitan.stamp"
fi
bash "$here/megatron.sh" # Megatron's own data loader
