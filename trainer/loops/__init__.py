"""Loops: training loops behind the protocol ``strategies.loop.Loop``."""
