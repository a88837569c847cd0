"""Stands in for torchrun where a test says so: `python -m torch.distributed.run` forks its ranks from a warm process.

Python imports this module at its start when this folder is in PYTHONPATH. Only a command line that starts torchrun
while WARM_RANKS names a socket is taken over; it is handed to the server in `warm_ranks.py`, and this process lives as
long as its ranks do. If it is killed, its end of the connection closes and the server ends the ranks.
"""

import os
import sys

if os.environ.get("WARM_RANKS") and sys.orig_argv[1:3] == ["-m", "torch.distributed.run"]:
    import json
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(os.environ["WARM_RANKS"])
        asked = {"argv": sys.orig_argv[3:], "cwd": os.getcwd(), "environ": dict(os.environ)}
        socket.send_fds(server, [b"+"], [1, 2])
        with server.makefile("rw") as wire:
            wire.write(json.dumps(asked) + "\n")
            wire.flush()
            answer = wire.readline()
    os._exit(int(answer or 1))
