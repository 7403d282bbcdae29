"""`python -m lessons`: see command.py."""

import signal

from lessons.command import main

signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `python -m lessons | head` ends without an error
signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
main()
