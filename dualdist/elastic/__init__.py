"""Elastic training: state, checkpoints, and ranks that come and go."""

from dualdist.elastic.training_state import REQUEUE, State, Stopped, request_stop, run, should_stop

__all__ = ["REQUEUE", "State", "Stopped", "request_stop", "run", "should_stop"]
