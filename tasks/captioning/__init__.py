"""Captioning: images described in words.

Two stacks of blocks, ragged text beside images: the first example, and where strategies add up.
"""
