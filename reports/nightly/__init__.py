"""The main job: a night's suites, whole or in shards, and the pytest plugin that stores tests."""
