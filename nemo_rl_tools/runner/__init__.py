"""The standalone runner: one policy worker on given rows, without Ray and without reinforcement learning."""
