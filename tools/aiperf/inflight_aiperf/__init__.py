"""A plugin for NVIDIA AIPerf."""
