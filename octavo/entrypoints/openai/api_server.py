"""`python -m octavo.entrypoints.openai.api_server --model MODEL`: the server, at the place vLLM has it."""

import sys

from octavo.api.cli import api_server

if __name__ == "__main__":
    sys.exit(api_server())
