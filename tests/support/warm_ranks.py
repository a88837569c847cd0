"""Starts torchrun's workers by fork from a process that has imported torch already: seconds per rank less.

While `warm_launches()` lasts, `python -m torch.distributed.run --standalone --nproc-per-node N [-m] SCRIPT ...` is
served by this module (see `warm/sitecustomize.py`). Ranks are still processes of their own that meet through gloo over
TCP, with the variables that torchrun sets; what is skipped is importing torch in each. The launcher is torchrun itself
in `test_convert_launch.py`, for the GPT of `test_example_moves.py`, and wherever WARM_RANKS is taken out of the
environment. One difference: /proc shows the server's environment for these ranks, so samerun's mark is not found
on them; they end with the process that asked for them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing.util
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WARM_PATH = str(Path(__file__).parent / "warm")
"""Belongs into PYTHONPATH of whatever is to start warm ranks."""


_OF_SAMERUN = ("capture", "contribution", "environment", "evaluation", "measure", "recorder", "sampler", "sidecar")

ZERO = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
"""The second is imported by every engine, and costs more than a second: it compiles."""

HUGGING_FACE = (
    *("transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate.utils.fsdp_utils"),
    *ZERO,  # which Accelerate imports where it is installed
)


@contextlib.contextmanager
def warm_launches(*modules: str) -> Iterator[None]:
    """Serves warm ranks to every torchrun that this process or its children start while the context lasts.

    `modules` are imported beside torch.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/ranks"
        before = {name: os.environ.get(name) for name in ("WARM_RANKS", "PYTHONPATH")}
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen([sys.executable, __file__, path, *modules], env=environment, stdout=subprocess.PIPE)
        try:
            # A framework may say something of its own while it is imported.
            if server.stdout is None or b"ready\n" not in iter(server.stdout.readline, b""):
                raise RuntimeError("the server of warm ranks did not start")
            os.environ["WARM_RANKS"] = path
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (WARM_PATH, before["PYTHONPATH"])))
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            server.kill()
            server.wait()
            if server.stdout:
                server.stdout.close()


def serve(path: str, *modules: str) -> None:
    """Imports what ranks need, then forks one supervisor per connection."""
    import importlib

    import torch
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.utils.data

    for module in (*(f"samerun.train.{name}" for name in _OF_SAMERUN), *modules):
        importlib.import_module(module)
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        while True:
            client, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _supervise(client)
            client.close()


def _supervise(client: socket.socket) -> None:
    """One launch: forks the ranks, ends them all when one fails or the client goes away, answers with the status."""
    _, outputs, _, _ = socket.recv_fds(client, 1, 2)
    with client.makefile("r") as wire:
        asked = json.loads(wire.readline())
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    options = _options(asked["argv"])
    port = _free_port()
    ranks = {_fork_rank(client, asked, options, port, rank): rank for rank in range(options.nproc_per_node)}
    status = 0
    while ranks:
        readable, _, _ = select.select([client], [], [], 0.02)
        gone = bool(readable) and not client.recv(1)
        for pid in list(ranks):
            ended, wait_status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(wait_status)
                rank = ranks.pop(pid)
                if code and not status:
                    status = 1
                    print(f"rank {rank} failed with exit code {code}", file=sys.stderr, flush=True)
        if gone or status:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        client.sendall(f"{status}\n".encode())
    os._exit(0)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--standalone", action="store_true", required=True)
    parser.add_argument("--nproc-per-node", "--nproc_per_node", type=int, required=True)
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fork_rank(client: socket.socket, asked: dict[str, Any], options: argparse.Namespace, port: int, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    client.close()
    count = str(options.nproc_per_node)
    counts = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), count)
    numbers = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    place = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    elastic = {"TORCHELASTIC_RUN_ID": "warm", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    code = 1
    try:
        os.environ.clear()
        os.environ.update(asked["environ"] | counts | numbers | place | elastic)
        os.chdir(asked["cwd"])
        if options.module:
            sys.argv = ["", *options.arguments]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.argv = [script := os.path.abspath(options.script), *options.arguments]
            sys.path.insert(0, os.path.dirname(script))
            runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = 0 if end.code is None else end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            multiprocessing.util._exit_function()  # ends the processes that the rank started, which hold its output
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose modules would be taken for the frameworks that they are named after
    serve(*sys.argv[1:])
