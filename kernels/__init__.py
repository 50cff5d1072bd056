"""Kernels, one folder each: a plain reference, portable XLA code and accelerator code behind one API."""
