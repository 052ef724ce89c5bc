"""Episodes: many turns between a policy and an environment, sampled token by token and never tokenized again."""
