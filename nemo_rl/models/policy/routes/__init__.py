"""Router replay of a policy: each rank's slices, its routers, its part of the trace."""
