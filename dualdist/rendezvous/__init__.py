"""Rendezvous of a job's ranks, choice of the backend, and opening of a session."""
