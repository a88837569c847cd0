#!/usr/bin/env bash
# Puts a release of Megatron whose own data loader runs (megatron.training) beside the packages of the active environment,
# for tests/trainers/test_loader_orders.py. Its metadata asks for a newer Python than its code needs.
set -euo pipefail
into="${VIRTUAL_ENV:?activate an environment first}/megatron-training"
[ -d "$into" ] && exit 0
pip install --quiet --disable-pip-version-check triton==3.9.0
pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python --only-binary=:all: \
  --python-version 3.12 --target "$into.new" megatron-core==0.19.2
mv "$into.new" "$into"
