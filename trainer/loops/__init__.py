"""Loops: training loops behind the protocol ``strategies.loop_protocol.Loop``."""
