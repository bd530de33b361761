"""How many real silent faults of ``torch.compile`` our guards catch, each in a training of a few seconds.

``python -m tests.catch_rate --out F`` runs them all, each in a process, and writes a line of JSON a case.
"""

from tests.catch_rate import aot, dynamo, inductor, planted
from tests.catch_rate.case import CASES

__all__ = ["CASES", "aot", "dynamo", "inductor", "planted"]
