"""Log-probs and the CISPO loss straight from hidden states and head weights."""
