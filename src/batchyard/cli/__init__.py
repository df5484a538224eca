"""Floor 9. The command line: the only place that reads flags, files of settings and the environment."""
