"""Diagnosis of a running job: stragglers, a Chrome trace of all ranks, records of training runs."""
