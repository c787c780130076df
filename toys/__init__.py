"""What makes small models: the shipped toys, those of the examples, and models of real text without a hub."""
