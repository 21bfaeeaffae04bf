"""Operators whose bits do not depend on the batch, the phase or the engine, for CUDA devices."""
