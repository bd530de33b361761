"""Locate: the smallest submodule, shape of batch or option under which compiling fails, breaks, differs or is slow."""
