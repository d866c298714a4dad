"""What the ranks of a local job import: once, by the server that they are forked off."""

from contextlib import suppress

import nemo_rl.models.policy.workers.compose
import nemo_rl.models.policy.workers.dtensor_engine

with suppress(ImportError):
    # Without megatron-core there is the DTensor worker.
    import nemo_rl.models.policy.workers.megatron_engine  # noqa: F401
