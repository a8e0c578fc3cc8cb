"""Find what prevents overlap in a data-parallel model, and say what to do about it.

In: a case. Out: a `Diagnosis`, each finding with the next step. Invariant: no setting, counter, generator or
process group of torch stays changed; compiled code is dropped.
"""

from ddpopt.doctor.diagnosis import Diagnosis
from ddpopt.doctor.examine import diagnose

__all__ = ["Diagnosis", "diagnose"]
