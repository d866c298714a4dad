"""Says once, and loudly, that rollout and trainer give sampled tokens different probabilities, and what to look at.

Called by the trainer after every step. Invariant: each line is said once in a run, whatever later steps measure.
"""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl.config.schema import MasterConfig

__all__ = ["MISMATCH_METRIC", "MISMATCH_THRESHOLD", "MismatchWarning"]

MISMATCH_METRIC, RATIO_METRIC = "train/token_mult_prob_error", "train/gen_probs_ratio"
MISMATCH_THRESHOLD = 1.05
"""Mean factor between the two probabilities of a token above which a fault is likelier than rounding."""


class MismatchWarning:
    """What a run has to say of the mismatch, step by step."""

    def __init__(self, config: MasterConfig) -> None:
        self._config = config
        self._is_said = False
        generation = config.policy.generation
        has_filter = generation.top_p < 1 or generation.top_k is not None
        self._tells_bias = has_filter and not generation.record_support

    def lines(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """What is to be said after this step; most often nothing."""
        found = []
        ratio, error = metrics.get(RATIO_METRIC), metrics.get(MISMATCH_METRIC)
        if self._tells_bias and ratio is not None:
            self._tells_bias = False
            found.append(self._bias(step, ratio))
        if not self._is_said and error is not None and error > MISMATCH_THRESHOLD:
            self._is_said = True
            found.append(self._mismatch(step, error))
        return found

    def _bias(self, step: int, ratio: float) -> str:
        return (
            "WARNING: policy.generation.top_p or top_k without policy.generation.record_support: engine and trainer "
            f"each find a kept set of their own; the mean of pi_old / pi_gen in step {step} is {ratio:.4f}, where 1 is "
            "without bias (with the sampler's log-probabilities for pi_old, updates within the step move it, too)"
        )

    def _mismatch(self, step: int, error: float) -> str:
        config = self._config
        causes = ["engines with weights of another step", "a precision or kernel of the engine that rounds otherwise"]
        if config.grpo.use_generation_logprobs_as_prev:
            causes.append("several updates per rollout (grpo.use_generation_logprobs_as_prev compares with the newest)")
        if self._config.policy.generation.top_p < 1 or config.policy.generation.top_k is not None:
            causes.append("kept sets of top-p or top-k that differ")
        if not config.policy.router_replay.enabled:
            causes.append("experts chosen otherwise, in a mixture of experts (policy.router_replay.enabled)")
        kept = "" if config.diagnostics.keep_steps.enabled else ", after a run with diagnostics.keep_steps.enabled=true"
        return (
            f"WARNING: {MISMATCH_METRIC} is {error:.4f} in step {step}, above {MISMATCH_THRESHOLD}: trainer and "
            f"rollout differ on the tokens that were sampled. Likely causes: {'; '.join(causes)}. To find it: "
            f"nemo-rl replay {config.logger.log_dir} --step {step} --explain-mismatch{kept}"
        )
