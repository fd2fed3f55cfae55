"""Checks of an installation, its host and its job, and what to type; torch may be broken or missing.

facts.py collects facts; checks/ has pure functions from facts to findings, one module per subject; diagnosis.py runs
them; explain.py traces the topology to its variables. smoke_test.py starts ranks and hosts.py probes other hosts, on
request. cli/doctor.py prints.
"""
