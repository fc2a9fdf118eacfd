"""Exact partitioning: which pairs of the gathered routing a worker runs under a plan.

`pair_intervals` reads the plan, `partition_pairs` the routing. The first needs no routing, so it
runs while the preceding microbatch still executes.
"""
