"""Plans a run before it starts: memory by phase and part, whether it fits, seconds of a step.  No torch, no device."""
