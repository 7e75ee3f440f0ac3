"""Stand-in for a standby trainer process: registers, answers /v1/promote, then lives on.

python fake_standby.py RUN_FOLDER NAME [accept | refuse | mute | die]
"""

from __future__ import annotations

import http.server
import json
import os
import sys
import time
from pathlib import Path

from torchtitan_rl_ft.run_folder import RunFolder


class Desk(http.server.BaseHTTPRequestHandler):
    manner = "accept"
    record = Path()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.manner == "die":
            os._exit(1)
        if self.manner == "mute":
            time.sleep(600)
        with open(self.record, "a") as f:
            f.write(json.dumps({**body, "pid": os.getpid()}) + "\n")
        self.send_response(200 if self.manner == "accept" else 409)
        answer = b"{}"
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    folder, name = RunFolder(sys.argv[1]), sys.argv[2]
    Desk.manner = sys.argv[3] if len(sys.argv) > 3 else "accept"
    Desk.record = folder.path / "promotions.jsonl"
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Desk)
    folder.register(name, f"http://127.0.0.1:{server.server_address[1]}")
    server.serve_forever()


if __name__ == "__main__":
    main()
