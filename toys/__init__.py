"""Scripts that make small models: the shipped toys, the examples' models, and models of real text without a hub."""
