"""Sweeps: what is to run in which order, each cell in a process of its own, and what became of it. Without torch."""
