"""Runs a training script with one fault in it: `python -m samerun.demo.sabotage FAULT train.py ARGUMENT...`

The script itself is not changed. The fault sits in the libraries that it calls, where a wrong version, a wrong flag or
an innocent edit would put it. Runs on every rank of the job.
"""

from __future__ import annotations

import os
import runpy
import sys

from samerun.demo.faults import FAULTS


def main() -> None:
    """Puts the fault in, then runs the script as if it had been started directly."""
    fault, script = sys.argv[1:3]
    if inject := FAULTS[fault].inject:
        inject()
    sys.argv = sys.argv[2:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
