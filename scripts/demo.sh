#!/usr/bin/env bash
# One command: sets up whatever is missing, then moves a small real training run from 4 ranks to 3 and proves it.
# Arguments go to `samerun demo`, e.g.: scripts/demo.sh --to dp_shard=2     scripts/demo.sh --break scheduler-ahead
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/bootstrap.sh"
exec samerun demo "$@"
