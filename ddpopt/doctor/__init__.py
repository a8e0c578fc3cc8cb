"""Diagnose a data-parallel model: run it compiled, and say what prevents overlap and what to do."""

from ddpopt.doctor.diagnosis import Diagnosis
from ddpopt.doctor.examine import diagnose

__all__ = ["Diagnosis", "diagnose"]
