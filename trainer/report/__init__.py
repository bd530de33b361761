"""Report: runs side by side, from their records alone. Imports neither torch, Lightning nor Hydra.

``find`` (runs) -> ``group`` (cells: workload and arm) -> ``compare`` (ratios, break-even, verdict) -> tables, pictures.
"""

from __future__ import annotations
