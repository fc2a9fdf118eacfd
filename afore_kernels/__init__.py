"""A Triton-kernel-centric MoE FFN executor with overlapped expert reconfiguration.

The public names below are loaded on first use, so that processes which need no torch (the
scheduler) do not import it.
"""

from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "Activation": "afore_kernels.config",
    "AttentionClient": "afore_kernels.runtime.client",
    "ExpertWeight": "afore_kernels.gemm.quant",
    "MoEConfig": "afore_kernels.config",
    "Plan": "afore_kernels.plan",
    "ReplicaCopy": "afore_kernels.plan",
    "Router": "afore_kernels.partition.router",
    "Target": "afore_kernels.plan",
    "Tier": "afore_kernels.runtime.launch",
    "TierConfig": "afore_kernels.config",
    "errors": "afore_kernels.errors",
    "moe_ffn": "afore_kernels.gemm.ffn",
    "route_tokens": "afore_kernels.partition.route",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_PUBLIC[name])
    return module if name == "errors" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
