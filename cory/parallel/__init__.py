"""Devices, collective operations and FSDP2 sharding."""
