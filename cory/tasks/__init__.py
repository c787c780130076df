"""Tasks: what describes a kind of them, and the kind that is defined by settings alone, your own."""
