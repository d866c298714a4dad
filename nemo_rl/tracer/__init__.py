"""The live tracer inside a run: what is watched, how it is reduced, and how it travels to the hub."""
