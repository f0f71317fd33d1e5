"""A GPU for machines without one."""
