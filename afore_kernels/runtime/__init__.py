"""The tier's processes, one module per box of the data flow (paper Figures 5 to 7).

::

     attention rank a            scheduler                      FFN worker w
    ┌────────────────┐   ┌────────────────────────┐   ┌──────────────────────────────────┐
    │ client         │   │ scheduler              │   │ worker                           │
    │  send_demand ──┼──▶│ mailbox: collect       │   │                                  │
    │                │   │ planner: plan          │   │                                  │
    │                │   │ plan_ring: publish ────┼──▶│ R  read plan t+1                 │
    │                │   └────────────────────────┘   │ S  migrator: submit its copies ┐ │
    │                │                                │                                │ │
    │  submit ───────┼───── transports.local ────────▶│ gather: inputs of t            │ │
    │                │                                │ C  wait for the copies of t ◀──┘ │
    │                │                                │ partition, expert FFN            │
    │                │                                │ collectives: all-reduce          │
    │  wait ◀────────┼───── transports.local ─────────┤ reply: this worker's rows        │
    └────────────────┘                                └──────────────────────────────────┘

    planner, rebalance, placement, cost   Algorithm 1; planner_oracle is its literal twin
    shared, memory                        atomics, waits and the one segment all of them map
    weights, devices                      expert slots, and the streams that work and copy
    launch, processes, admission          start, supervise, stop; who may be which rank
    timeline                              who did what, when
    adapters                              attention tiers

A plan depends on demand alone, so it is published, and its copies start, before the hidden states
of its target have arrived (section 6.1). `docs/architecture.md` follows one microbatch through it.
"""
