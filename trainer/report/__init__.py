"""Evidence: what runs' records say side by side. Reads RunRecords alone, without torch, Lightning or Hydra.

``find`` (runs) -> ``group`` (cells: workload and arm) -> ``compare`` (ratios, break-even, verdict) -> tables, pictures.
"""

from __future__ import annotations
