"""Run optax and optclip on inputs for which optax fails or is silently wrong."""
