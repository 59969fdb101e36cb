"""Stands for `python -m kvferry.services.local.cli` in tests of `kvferry up`: services without a model.

`FAKE_<ROLE>` in the environment makes one of them misbehave: `config` (exit status 2 at once), `crash` (once, soon
after it was ready), `stubborn` (ignores SIGTERM), `stuck` (never ready).
"""

from __future__ import annotations

import http.server
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2_grpc


def main() -> int:
    role = sys.argv[1]
    name = os.environ.get("KVFERRY_NODE__NODE_ID", role)
    manner = os.environ.get(f"FAKE_{role.upper()}", "")
    if manner == "config":
        print(f"kvferry: {role} has a wrong option")
        return 2
    folder = Path(os.environ["FAKE_FOLDER"])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set() if manner != "stubborn" else None)
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    if manner == "stuck":
        stop.wait()
        return 0
    end = serve_http(int(os.environ["KVFERRY_GATEWAY__PORT"])) if role == "gateway" else serve_grpc()
    if manner == "crash" and not (folder / "crashed").exists():
        (folder / "crashed").touch()
        time.sleep(1.5)
        print("about to crash", flush=True)
        os._exit(7)
    stop.wait()
    end()
    with (folder / "ended").open("a") as file:
        file.write(f"{name}\n")
    return 0


def serve_grpc():
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.add_insecure_port(f"127.0.0.1:{os.environ['KVFERRY_NODE__NODE_PORT']}")
    server.start()
    return lambda: server.stop(0).wait()


def serve_http(port: int):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.shutdown


if __name__ == "__main__":
    sys.exit(main())
