"""Collectives, FSDP2 sharding, devices."""
