"""`agent.server` with the stand-in for the command line, as a process of its own."""

import sys
from functools import partial
from pathlib import Path

from agent import server
from agent.mcp.fakes import FakeTool

if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    server.serve = partial(server.serve, command=FakeTool(folder).command)
    server.main()
