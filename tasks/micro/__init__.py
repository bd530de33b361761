"""Micro: small networks on generated data."""
