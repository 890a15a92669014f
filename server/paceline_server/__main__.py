"""`python -m paceline_server` is the `paceline-server` command."""

import sys

from paceline_server.entry import main

sys.exit(main())
