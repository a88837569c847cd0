"""A real S3 server on this machine, in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


@contextmanager
def s3_server(bucket: str, folder: Path) -> Iterator[str]:
    """Yields the URL of an empty bucket of moto's server; its address and keys are in the environment meanwhile."""
    import fsspec

    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    before = {name: os.environ.get(name) for name in settings}
    with open(folder / "server.log", "wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        os.environ.update(settings)
        try:
            _wait_for(port, server)
            fsspec.filesystem("s3").mkdir(bucket)
            yield f"s3://{bucket}"
        finally:
            server.kill()
            server.wait()
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
            fsspec.filesystem("s3").clear_instance_cache()


def _wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError("the S3 server did not start")
