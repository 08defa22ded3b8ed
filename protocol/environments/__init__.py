"""Tasks: the contract (base), token ids and text (tokenizer, rollout), built-in tasks and adapters."""
