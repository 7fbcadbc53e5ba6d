"""The exceptions of hybridcp: every error a user can cause derives from `HybridCPError`."""


class HybridCPError(ValueError):
    """Base class. The message names the constraint, the values, and what to do instead."""


class MaskError(HybridCPError):
    """A mask that cannot be built, combined, or applied to this sequence length."""


class LayoutError(HybridCPError):
    """Degrees, sharding or a layout file that do not fit the ranks, heads or sequence."""


class ScheduleError(HybridCPError):
    """A schedule that does not compute each allowed pair once, or a send without a receive."""


class InputError(HybridCPError):
    """A tensor, batch or file whose shape, dtype, device or content does not fit."""


class KernelError(HybridCPError):
    """No attention kernel supports what was asked; the message names the nearest that does."""


class PlanError(HybridCPError):
    """A question the planner cannot answer: impossible sizes, or no feasible plan."""


class ClusterError(HybridCPError):
    """A cluster description that is missing, unreadable or inconsistent."""
