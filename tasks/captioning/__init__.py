"""Captioning: images described in words."""
