"""Recorded routing through the planner or a live tier: the `afore replay` command.

::

    RoutingTrace ─▶ ContinuousBatching ─▶ Workload ─┬▶ plan_workload: the planner, no processes
                                                    └▶ drive_tier: a local tier, outputs checked
                                                          └▶ ReplayResult ─▶ table, JSON
"""

from afore_kernels.replay.command import add_arguments, run

__all__ = ["add_arguments", "run"]
