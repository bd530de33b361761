"""Peers: what people do without this project, run on the same work and by the same ruler."""
