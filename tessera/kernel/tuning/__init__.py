"""Autotuning: configurations, how they are searched and measured, and what was kept."""
