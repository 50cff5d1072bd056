"""Entry points and configuration files of the experiments."""
