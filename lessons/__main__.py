"""`python -m lessons`: see command.py."""

from lessons.command import main

main()
