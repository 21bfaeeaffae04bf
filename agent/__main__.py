"""`python -m agent` is `agent`."""

from agent.cli import main

main()
