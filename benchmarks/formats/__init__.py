"""SmolLM2 in every weight format that Octavo reads: see `__main__`."""
