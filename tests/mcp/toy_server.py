"""A door in front of a server of a few lines, which starts when told to: `toy_server.py FOLDER SECONDS [EXIT]`. Needs no SDK."""

import json
import sys
import time
from pathlib import Path

from agent.mcp.door import Door

door = Door(Path(sys.argv[1]))
print("noise from an import")
time.sleep(float(sys.argv[2]))
said = sys.argv[3] if len(sys.argv) > 3 else "toy"


def run() -> None:
    for line in sys.stdin.buffer:
        try:
            message = json.loads(line)
            number, method = message.get("id"), message.get("method")
        except (ValueError, AttributeError, RecursionError):
            number, method = "broken", "refused"
        outcome = {"error": {"code": -1, "message": "no"}} if "refused" in (method, said) else {"result": {"said": said, "length": len(line)}}
        sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": number, **outcome}) + "\n")
        sys.stdout.flush()


door.serve(run)
