"""Monitoring of waiting ranks: late, lost and failed ones, with their position and stack."""
