"""The main job: a night's suites, whole or in shards, and the pytest plugin that stores tests.

Nothing is imported here: pytest loads the plugin at its start, long before a test needs JAX.
"""
