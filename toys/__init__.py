"""Scripts that make small models: the shipped toys, the examples' models, and models for machines without a hub."""
