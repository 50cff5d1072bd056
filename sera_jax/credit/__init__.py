"""Credit assignment: arrays in, arrays out."""
