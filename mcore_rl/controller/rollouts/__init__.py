"""Which rollouts a step trains."""
