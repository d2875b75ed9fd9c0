"""Variants of each family of models, a module per family."""
