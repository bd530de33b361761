"""Parity: does what was compiled or captured compute what eager, or the step it was captured from, computes?"""
