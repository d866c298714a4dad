"""Advantage estimators, one file each; `grpo.adv_estimator.name` names one, `nemo_rl.config.parts` says where it is."""
