"""The nightly job: its suites, whole or in shards, and the pytest plugin that stores test results.

This module imports nothing: pytest loads the plugin at startup, long before a test needs JAX.
"""
