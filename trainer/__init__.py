"""The training loop that knows its compiler: runs a Task under a list of Strategies and writes a RunRecord."""
