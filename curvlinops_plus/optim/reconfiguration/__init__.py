"""Stochastic reconfiguration: natural gradients for log-amplitudes and other scores."""
