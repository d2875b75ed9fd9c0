"""`python -m octavo` is the program `octavo`."""

import sys

from octavo.api.cli import main

sys.exit(main())
