"""dualdist compare: contenders, launches, statistics, report."""
