"""Every exception the package raises at a public boundary.

::

    AforeError
    ├── ConfigError             a configuration value is missing, unknown or out of range
    ├── ShapeError              a tensor's shape, dtype or value range is not what was agreed
    ├── PlanError               a plan or demand record is not valid
    │   ├── StalePlanError          its sequence is behind the reader
    │   ├── PlanOrderError          its sequence or target is not the next in order
    │   ├── InfeasiblePlanError     it breaks a placement, slot or count constraint
    │   └── CountMismatchError      its counts differ from the gathered routing
    ├── TransportError          a peer or the path to it failed
    │   ├── MailboxTimeout          an attention rank's demand or input did not arrive in time
    │   ├── PlanRingTimeout         a plan or a reader's acknowledgement did not arrive in time
    │   ├── ReplyTimeout            a result did not arrive in time
    │   └── PeerLost                a worker, the scheduler, the tier or a client is gone
    └── CheckpointError         a checkpoint's file, key, shape or dtype is not what the model needs
"""


class AforeError(Exception):
    """Base of every error of this package."""


class ConfigError(AforeError, ValueError):
    """A configuration value is missing, unknown or out of range."""


class ShapeError(AforeError, ValueError):
    """A tensor's shape, dtype or value range is not what was agreed."""


class PlanError(AforeError):
    """A plan or demand record is not valid."""


class StalePlanError(PlanError):
    """A record's sequence is behind the reader's."""


class PlanOrderError(PlanError):
    """A record's sequence or target is not the next in order."""


class InfeasiblePlanError(PlanError):
    """A plan breaks a placement, slot or count constraint."""


class CountMismatchError(PlanError):
    """A plan's counts differ from the gathered routing."""


class TransportError(AforeError):
    """A peer, or the path to it, failed."""


class MailboxTimeout(TransportError, TimeoutError):
    """An attention rank's demand or input did not arrive in time."""


class PlanRingTimeout(TransportError, TimeoutError):
    """A plan, or a reader's acknowledgement, did not arrive in time."""


class ReplyTimeout(TransportError, TimeoutError):
    """A result did not arrive in time."""


class PeerLost(TransportError, ConnectionError):
    """A worker, the scheduler, the tier or a client is gone."""


class CheckpointError(AforeError):
    """A checkpoint's file, key, shape or dtype is not what the model needs."""
