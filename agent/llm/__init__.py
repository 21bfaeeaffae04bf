"""An LLM as the author of a run's choices: providers, conversation, limits, what the model may look at, and the trajectory on disk."""
