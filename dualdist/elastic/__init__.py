"""Elastic training: commit and restore state, stop on preemption, and continue when ranks come and go."""

from dualdist.elastic.run_loop import run
from dualdist.elastic.training_state import State, Stopped, request_stop, should_stop
from dualdist.utils.variables import REQUEUE

__all__ = ["REQUEUE", "State", "Stopped", "request_stop", "run", "should_stop"]
