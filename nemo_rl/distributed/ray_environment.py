"""Variables of Ray's own processes, wherever this package starts them; imports neither torch nor Ray."""

from __future__ import annotations

__all__ = ["FAIR_SHARE", "NO_SPARE_WORKERS", "ray_environment"]

FAIR_SHARE = {"RAY_worker_niceness": "0"}
"""Ray's default, 15, leaves workers 1.5% of a core that somebody else's process keeps busy, and no deadline holds."""
NO_SPARE_WORKERS = {"RAY_enable_worker_prestart": "false", "RAY_prestart_worker_first_driver": "false"}
"""Ray starts an idle worker per CPU in advance; ours bring an environment of their own and can use none of them."""
DEAF_S = 30.0
"""How long Ctrl-C, or the death of one of Ray's servers, may go unheard while Ray starts."""


def ray_environment(timeout_s: float) -> dict[str, str]:
    """
    Args:
        timeout_s: of a start of ours, which counts in place of Ray's own deadlines.
    """
    return {
        "RAY_worker_register_timeout_seconds": str(round(timeout_s)),
        "RAY_agent_register_timeout_ms": str(round(timeout_s * 1000)),
        # One call of Ray's that no signal reaches; it is repeated until our own deadline.
        "RAY_raylet_start_wait_time_s": str(round(min(timeout_s, DEAF_S))),
        **FAIR_SHARE,
        **NO_SPARE_WORKERS,
    }
