"""Octavo beside llama.cpp, OpenVINO GenAI and vLLM on this machine: see `__main__`."""
