"""The agent: finds, fixes and proves. Nothing here imports torch or vllm; candidate code runs in job processes only."""

__version__ = "0.1.0"
