"""What a piece of state should be (causal ids) and what its bytes are (content ids)."""
