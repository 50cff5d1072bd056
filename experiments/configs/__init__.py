"""Configuration files, one a method and benchmark."""
