"""Check: what a project's CI holds against its base branch: checks, graph breaks, recompiles, graphs and the step."""
