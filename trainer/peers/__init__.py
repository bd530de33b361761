"""Peers: what people do without this project, measured as our own runs: ``run=peer run.peer=loop_compile``."""
