"""Checks of the doctor: one module per subject, from facts to findings."""
